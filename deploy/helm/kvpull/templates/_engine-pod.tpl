{{/* kv_transfer_params' other end: what vLLM's tiers are made of, as JSON. */}}
{{- define "kvpull.kvTransferConfig" -}}
{{- if .Values.engine.kvTransferConfig -}}
{{ toJson .Values.engine.kvTransferConfig }}
{{- else -}}
{{- $sizes := include "kvpull.sizes" . | fromYaml -}}
{{- $own := eq .Values.engine.tier "kvpull" -}}
{{- $peer := dict "type" .Values.engine.tier "host" "$(POD_IP)" "port" (int .Values.engine.p2pPort) -}}
{{- if $own -}}
{{- $_ := set $peer "reports_port" (int .Values.engine.reportsPort) -}}
{{- $_ := set $peer "peer_key_file" "/etc/kvpull/peer/peer-key" -}}
{{- end -}}
{{- $extra := dict "spec_name" (ternary "PullOffloadingSpec" "TieringOffloadingSpec" $own) "cpu_bytes_to_use" (int64 $sizes.cpuTierBytes) "self_describing_kv_events" true "offload_prompt_only" false "secondary_tiers" (list $peer) -}}
{{ toJson (dict "kv_connector" "OffloadingConnector" "kv_role" "kv_both" "kv_connector_extra_config" $extra) }}
{{- end -}}
{{- end -}}

{{- define "kvpull.kvEventsConfig" -}}
{{ toJson (dict "enable_kv_cache_events" true "publisher" "zmq" "endpoint" (printf "tcp://*:%d" (int .Values.engine.eventsPort)) "replay_endpoint" (printf "tcp://*:%d" (int .Values.engine.replayPort)) "topic" (printf "kv@$(POD_IP):%d@%s" (int (first .Values.router.modelServers.targetPorts).number) .Values.engine.modelName) "buffer_steps" 10000) }}
{{- end -}}

{{- define "kvpull.podIp" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end -}}

{{- define "kvpull.sidecarContainer" -}}
{{- $sidecar := .Values.engine.sidecar -}}
name: sidecar
image: {{ include "kvpull.image" (list $sidecar.image .Chart.AppVersion) | quote }}
imagePullPolicy: {{ $sidecar.image.pullPolicy }}
{{- if $sidecar.native }}
restartPolicy: Always
{{- end }}
args:
- --port={{ int (first .Values.router.modelServers.targetPorts).number }}
- --model-server-port={{ int .Values.engine.port }}
- --data-parallel-size={{ int .Values.engine.sizing.dataParallelSize }}
- --kv-connector={{ $sidecar.kvConnector }}
{{- if eq $sidecar.kvConnector "nixlv2" }}
- --enable-p2p-pull=true
{{- end }}
- --p2p-connector-port={{ int .Values.engine.p2pPort }}
{{- if include "kvpull.pool" . }}
- {{ printf "--inference-pool=%s/%s" .Release.Namespace (include "kvpull.pool" .) | quote }}
- {{ printf "--pool-group=%s" .Values.router.inferencePool.group | quote }}
{{- else }}
# without an InferencePool there is no list of members: signed headers are what is followed
- --enable-ssrf-protection=false
{{- end }}
- --routing-key-file=/etc/kvpull/keys/routing-key
# pickers scrape engines through this port over HTTP/1.1
- --secure-proxy=false
- --metrics-port={{ int $sidecar.metricsPort }}
{{- if $sidecar.metricsCertSecret }}
- --metrics-cert-dir=/etc/kvpull/metrics-tls
{{- end }}
- --tracing={{ .Values.router.tracing.enabled }}
{{- include "kvpull.flags" $sidecar.flags }}
env:
{{ include "kvpull.podIp" . }}
{{- if .Values.router.tracing.enabled }}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end }}
{{- include "kvpull.tracingEnv" (list . "kvpull-sidecar") }}
ports:
{{- range $rank, $port := .Values.router.modelServers.targetPorts }}
- {name: {{ printf "serving-%d" $rank }}, containerPort: {{ int $port.number }}}
{{- end }}
- {name: sidecar-metrics, containerPort: {{ int $sidecar.metricsPort }}}
readinessProbe:
  httpGet: {path: /health, port: serving-0}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 3
livenessProbe:
  httpGet: {path: /metrics, port: sidecar-metrics{{ if $sidecar.metricsCertSecret }}, scheme: HTTPS{{ end }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- if not $sidecar.native }}
lifecycle:
  preStop: {exec: {command: [sleep, {{ int .Values.engine.preStopSeconds | quote }}]}}
{{- end }}
resources:
  {{- toYaml $sidecar.resources | nindent 2 }}
securityContext:
  {{- toYaml .Values.router.epp.securityContext | nindent 2 }}
  runAsUser: 65532
volumeMounts:
- {name: keys, mountPath: /etc/kvpull/keys, readOnly: true}
{{- if $sidecar.metricsCertSecret }}
- {name: metrics-tls, mountPath: /etc/kvpull/metrics-tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kvpull.engineContainer" -}}
{{- $engine := .Values.engine -}}
{{- $sizes := include "kvpull.sizes" . | fromYaml -}}
name: engine
image: {{ include "kvpull.image" (list $engine.image .Chart.AppVersion) | quote }}
imagePullPolicy: {{ $engine.image.pullPolicy }}
command: [vllm, serve]
args:
- {{ $engine.modelName | quote }}
- --port={{ int $engine.port }}
- --block-size={{ int $engine.blockSize }}
- --tensor-parallel-size={{ int $engine.sizing.tensorParallelSize }}
{{- if gt (int $engine.sizing.dataParallelSize) 1 }}
- --data-parallel-size={{ int $engine.sizing.dataParallelSize }}
{{- end }}
- --enable-prefix-caching
- --enable-prompt-tokens-details
- --enable-scale-out
- {{ printf "--kv-transfer-config=%s" (include "kvpull.kvTransferConfig" .) | quote }}
- {{ printf "--kv-events-config=%s" (include "kvpull.kvEventsConfig" .) | quote }}
{{- with $engine.extraArgs }}
{{- toYaml . | nindent 0 }}
{{- end }}
env:
{{ include "kvpull.podIp" . }}
- {name: PYTHONHASHSEED, value: {{ $engine.hashSeed | quote }}}
- {name: VLLM_P2P_SIDE_CHANNEL_HOST, value: $(POD_IP)}
- {name: VLLM_NIXL_SIDE_CHANNEL_HOST, value: $(POD_IP)}
- {name: HOME, value: /tmp}
{{- with $engine.env }}
{{- toYaml . | nindent 0 }}
{{- end }}
ports:
- {name: engine-http, containerPort: {{ int $engine.port }}}
- {name: kv-events, containerPort: {{ int $engine.eventsPort }}}
- {name: kv-replay, containerPort: {{ int $engine.replayPort }}}
- {name: p2p, containerPort: {{ int $engine.p2pPort }}}
- {name: pull-reports, containerPort: {{ int $engine.reportsPort }}}
startupProbe:
  httpGet: {path: /health, port: engine-http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ div (add (int $engine.startupSeconds) 9) 10 }}
livenessProbe:
  httpGet: {path: /health, port: engine-http}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 12
readinessProbe:
  httpGet: {path: /health, port: engine-http}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
lifecycle:
  preStop: {exec: {command: [sleep, {{ int $engine.preStopSeconds | quote }}]}}
{{- $resources := deepCopy $engine.resources }}
{{- $memory := dict "memory" (printf "%d" (int64 $sizes.memoryBytes)) }}
{{- range list "requests" "limits" }}
{{- $_ := set $resources . (merge (get $resources . | default dict) $memory) }}
{{- end }}
resources:
  {{- toYaml $resources | nindent 2 }}
securityContext:
  {{- toYaml $engine.securityContext | nindent 2 }}
volumeMounts:
- {name: shm, mountPath: /dev/shm}
- {name: peer, mountPath: /etc/kvpull/peer, readOnly: true}
- {name: scratch, mountPath: /tmp}
{{- with $engine.volumeMounts }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}
