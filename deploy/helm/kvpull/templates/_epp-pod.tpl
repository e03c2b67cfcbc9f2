{{- define "kvpull.eppArgs" -}}
{{- $epp := .Values.router.epp -}}
- {{ printf "--config-file=/etc/kvpull/config/%s" $epp.pluginsConfigFile | quote }}
{{- if include "kvpull.pool" . }}
- {{ printf "--pool-name=%s" (include "kvpull.pool" .) | quote }}
- {{ printf "--pool-namespace=%s" .Release.Namespace | quote }}
- {{ printf "--pool-group=%s" .Values.router.inferencePool.group | quote }}
{{- else }}
{{- $terms := list }}
{{- range $name, $value := .Values.router.modelServers.matchLabels }}{{ $terms = append $terms (printf "%s=%s" $name $value) }}{{ end }}
- {{ printf "--endpoint-selector=%s" (join "," $terms) | quote }}
- {{ printf "--endpoint-target-ports=%s" (include "kvpull.targetPorts" .) | quote }}
{{- end }}
{{- range prepend .Values.thresholds.extraConfigMaps (include "kvpull.thresholds" .) }}
- {{ printf "--thresholds-configmap=%s" . | quote }}
{{- end }}
{{- with .Values.router.tokenizer.local.path }}
- {{ printf "--tokenizer=%s" . | quote }}
{{- end }}
- --grpc-port={{ int $epp.extProcPort }}
- --grpc-health-port={{ int $epp.grpcHealthPort }}
- --metrics-port={{ int $epp.metricsPort }}
{{- if $epp.metricsTls.certSecret }}
- --metrics-cert-dir=/etc/kvpull/metrics-tls
{{- end }}
{{- if $epp.metricsTls.clientCaSecret }}
- --metrics-client-ca-file=/etc/kvpull/metrics-clients/ca.crt
{{- end }}
- --debug-token-file=/etc/kvpull/keys/debug-token
- --routing-key-file=/etc/kvpull/keys/routing-key
{{- if .Values.keys.saltKey }}
- --salt-key-file=/etc/kvpull/keys/salt-key
{{- end }}
- --secure-serving={{ $epp.secureServing }}
{{- if $epp.certSecret }}
- --cert-path=/etc/kvpull/tls
{{- end }}
- {{ printf "--objectives-group=%s" .Values.router.objectivesGroup | quote }}
{{- if include "kvpull.several" . }}
- --ha-mode={{ include "kvpull.haMode" . }}
- {{ printf "--ha-lease-name=%s" (include "kvpull.epp" .) | quote }}
{{- end }}
{{- if include "kvpull.snapshots" . }}
- --snapshot-port={{ int .Values.snapshots.port }}
- {{ printf "--sibling=%s.%s:%d" (include "kvpull.siblings" .) (include "kvpull.domain" .) (int .Values.snapshots.port) | quote }}
- --sibling-tls-path=/etc/kvpull/siblings
- {{ printf "--sibling-server-name=%s" (include "kvpull.epp" .) | quote }}
- --snapshot-timeout={{ int .Values.snapshots.timeoutSeconds }}s
{{- end }}
- --drain-timeout={{ int $epp.drainTimeoutSeconds }}s
- --lame-duck={{ int $epp.lameDuckSeconds }}s
- --log-level={{ $epp.logLevel }}
- --tracing={{ .Values.router.tracing.enabled }}
{{- with $epp.metricsDataSource.scheme }}
- --model-server-metrics-scheme={{ . }}
{{- end }}
{{- with $epp.metricsDataSource.path }}
- {{ printf "--model-server-metrics-path=%s" . | quote }}
{{- end }}
{{- if $epp.metricsDataSource.insecureSkipVerify }}
- --model-server-metrics-https-insecure-skip-verify=true
{{- end }}
{{- include "kvpull.flags" (omit $epp.flags "ha-enable-leader-election") }}
{{- end -}}

{{/* Probes by what they mean: liveness says that the process runs, on a starting picker too; readiness that requests may come. */}}
{{- define "kvpull.eppProbes" -}}
startupProbe:
  grpc: {port: {{ int .Values.router.epp.grpcHealthPort }}, service: liveness}
  periodSeconds: 2
  failureThreshold: {{ add 30 (div (int .Values.snapshots.timeoutSeconds) 2) }}
livenessProbe:
  grpc: {port: {{ int .Values.router.epp.grpcHealthPort }}, service: liveness}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  grpc: {port: {{ int .Values.router.epp.grpcHealthPort }}, service: readiness}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
{{- end -}}

{{- define "kvpull.eppContainer" -}}
{{- $epp := .Values.router.epp -}}
name: epp
image: {{ include "kvpull.image" (list $epp.image .Chart.AppVersion) | quote }}
imagePullPolicy: {{ $epp.image.pullPolicy }}
args:
{{- include "kvpull.eppArgs" . | nindent 0 }}
env:
# names this replica's Lease, and lets the cluster remove it with the pod
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_UID
  valueFrom: {fieldRef: {fieldPath: metadata.uid}}
{{- include "kvpull.tracingEnv" (list . "kvpull-epp") }}
{{- with $epp.env }}
{{- toYaml . | nindent 0 }}
{{- end }}
ports:
- {name: grpc-ext-proc, containerPort: {{ int $epp.extProcPort }}}
- {name: grpc-health, containerPort: {{ int $epp.grpcHealthPort }}}
- {name: http-metrics, containerPort: {{ int $epp.metricsPort }}}
{{- if include "kvpull.snapshots" . }}
- {name: snapshots, containerPort: {{ int .Values.snapshots.port }}}
{{- end }}
{{- with $epp.extraContainerPorts }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{ include "kvpull.eppProbes" . }}
resources:
  {{- toYaml $epp.resources | nindent 2 }}
securityContext:
  {{- toYaml $epp.securityContext | nindent 2 }}
volumeMounts:
- {name: config, mountPath: /etc/kvpull/config, readOnly: true}
- {name: keys, mountPath: /etc/kvpull/keys, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if $epp.certSecret }}
- {name: tls, mountPath: /etc/kvpull/tls, readOnly: true}
{{- end }}
{{- if $epp.metricsTls.certSecret }}
- {name: metrics-tls, mountPath: /etc/kvpull/metrics-tls, readOnly: true}
{{- end }}
{{- if $epp.metricsTls.clientCaSecret }}
- {name: metrics-clients, mountPath: /etc/kvpull/metrics-clients, readOnly: true}
{{- end }}
{{- if include "kvpull.snapshots" . }}
- {name: siblings, mountPath: /etc/kvpull/siblings, readOnly: true}
{{- end }}
{{- if and .Values.router.tokenizer.local.path .Values.router.tokenizer.local.volume }}
- {name: tokenizer, mountPath: {{ .Values.router.tokenizer.local.path | quote }}, readOnly: true}
{{- end }}
{{- with $epp.volumeMounts }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}

{{- define "kvpull.tokenizerContainer" -}}
{{- $tokenizer := .Values.router.tokenizer -}}
name: tokenizer
image: {{ include "kvpull.image" (list $tokenizer.image "latest") | quote }}
imagePullPolicy: {{ $tokenizer.image.pullPolicy }}
command:
{{- toYaml ($tokenizer.command | default (list "vllm" "launch" "render")) | nindent 0 }}
args:
{{- toYaml ($tokenizer.args | default (list $tokenizer.modelName "--port" (printf "%d" (int $tokenizer.port)))) | nindent 0 }}
{{- with $tokenizer.extraArgs }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- with $tokenizer.env }}
env:
{{- toYaml . | nindent 0 }}
{{- end }}
ports:
- {name: render-http, containerPort: {{ int $tokenizer.port }}}
readinessProbe:
  httpGet: {path: /health, port: render-http}
  periodSeconds: 5
  failureThreshold: 3
resources:
  {{- toYaml $tokenizer.resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
{{- with $tokenizer.volumeMounts }}
volumeMounts:
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}

{{- define "kvpull.eppVolumes" -}}
- name: config
  configMap: {name: {{ include "kvpull.epp" . }}-config}
- name: keys
  secret:
    secretName: {{ include "kvpull.keys" . }}
    defaultMode: 0440
    items:
    - {key: debug-token, path: debug-token}
    - {key: routing-key, path: routing-key}
    {{- if .Values.keys.saltKey }}
    - {key: salt-key, path: salt-key}
    {{- end }}
- name: tmp
  emptyDir: {sizeLimit: 256Mi}
{{- with .Values.router.epp.certSecret }}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with .Values.router.epp.metricsTls.certSecret }}
- name: metrics-tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with .Values.router.epp.metricsTls.clientCaSecret }}
- name: metrics-clients
  secret: {secretName: {{ . }}, defaultMode: 0440, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- if include "kvpull.snapshots" . }}
- name: siblings
  secret: {secretName: {{ include "kvpull.siblingTls" . }}, defaultMode: 0440}
{{- end }}
{{- with .Values.router.tokenizer.local }}
{{- if and .path .volume }}
- name: tokenizer
  {{- toYaml .volume | nindent 2 }}
{{- end }}
{{- end }}
{{- if .Values.router.tokenizer.enabled }}
{{- with .Values.router.tokenizer.volumes }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end }}
{{- if and .Values.router.proxy.enabled (eq .Values.router.proxy.mode "sidecar") }}
- name: envoy
  configMap: {name: {{ include "kvpull.proxy" . }}}
{{- end }}
{{- with .Values.router.epp.volumes }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}

{{/* Spread where that is possible. Argument: list of context and component. */}}
{{- define "kvpull.spread" -}}
{{- $arguments := . -}}
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
- maxSkew: 1
  topologyKey: {{ . }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "kvpull.selectorLabels" $arguments | nindent 6 }}
{{- end }}
{{- end -}}
