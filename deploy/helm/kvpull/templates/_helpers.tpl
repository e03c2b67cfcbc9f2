{{- define "kvpull.fullname" -}}
{{- .Values.nameOverride | default .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvpull.epp" -}}{{ include "kvpull.fullname" . }}-epp{{- end -}}
{{- define "kvpull.engine" -}}{{ include "kvpull.fullname" . }}-engine{{- end -}}
{{- define "kvpull.proxy" -}}{{ include "kvpull.fullname" . }}-proxy{{- end -}}

{{- define "kvpull.chart" -}}{{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}{{- end -}}

{{/* Labels of everything. Argument: list of the context and the component. */}}
{{- define "kvpull.labels" -}}
{{- $root := index . 0 -}}
{{ include "kvpull.selectorLabels" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ include "kvpull.chart" $root }}
{{- end -}}

{{/* Never change with an upgrade: a Deployment's selector is immutable. */}}
{{- define "kvpull.selectorLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: kvpull
app.kubernetes.io/instance: {{ include "kvpull.fullname" $root }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "kvpull.meta" -}}
{{- $root := index . 0 -}}
name: {{ index . 2 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "kvpull.labels" . | nindent 2 }}
{{- end -}}

{{/* Argument: list of an image and the tag where it names none. */}}
{{- define "kvpull.image" -}}
{{- $image := index . 0 -}}
{{- $name := $image.repository -}}
{{- if $image.registry }}{{ $name = printf "%s/%s" (trimSuffix "/" $image.registry) $name }}{{ end -}}
{{- if $image.digest -}}{{ $name }}@{{ $image.digest }}{{- else -}}{{ $name }}:{{ $image.tag | default (index . 1) }}{{- end -}}
{{- end -}}

{{- define "kvpull.pool" -}}
{{- if .Values.router.inferencePool.name }}{{ .Values.router.inferencePool.name }}
{{- else if .Values.router.inferencePool.create }}{{ include "kvpull.fullname" . }}{{ end -}}
{{- end -}}

{{- define "kvpull.serviceAccount" -}}
{{- .Values.router.epp.serviceAccount.name | default (ternary (include "kvpull.epp" .) "default" .Values.router.epp.serviceAccount.create) -}}
{{- end -}}

{{- define "kvpull.engineServiceAccount" -}}
{{- .Values.engine.serviceAccount.name | default (ternary (include "kvpull.engine" .) "default" .Values.engine.serviceAccount.create) -}}
{{- end -}}

{{- define "kvpull.keys" -}}
{{- .Values.keys.existingSecret | default (printf "%s-keys" (include "kvpull.fullname" .)) -}}
{{- end -}}

{{- define "kvpull.thresholds" -}}
{{- .Values.thresholds.name | default (printf "%s-thresholds" (include "kvpull.epp" .)) -}}
{{- end -}}

{{/* "true" where there is, or may be, more than one picker. */}}
{{- define "kvpull.several" -}}
{{- $epp := .Values.router.epp -}}
{{- $most := ternary $epp.autoscaling.maxReplicas $epp.replicas $epp.autoscaling.enabled -}}
{{- if gt (int $most) 1 }}true{{ end -}}
{{- end -}}

{{/* The reference's flag means active-passive, too. */}}
{{- define "kvpull.haMode" -}}
{{- if eq (toString (get .Values.router.epp.flags "ha-enable-leader-election")) "true" }}active-passive
{{- else }}{{ .Values.router.epp.haMode }}{{ end -}}
{{- end -}}

{{/* "true" where pickers wait for each other: standbys are never ready. */}}
{{- define "kvpull.passive" -}}
{{- if and (include "kvpull.several" .) (eq (include "kvpull.haMode" .) "active-passive") }}true{{ end -}}
{{- end -}}

{{- define "kvpull.snapshots" -}}
{{- if and .Values.snapshots.enabled (include "kvpull.several" .) }}true{{ end -}}
{{- end -}}

{{- define "kvpull.siblings" -}}{{ include "kvpull.epp" . }}-siblings{{- end -}}
{{- define "kvpull.siblingTls" -}}
{{- .Values.snapshots.tls.existingSecret | default (printf "%s-sibling-tls" (include "kvpull.epp" .)) -}}
{{- end -}}

{{/* Where the picker's own URL and the gateway's are, inside the cluster. */}}
{{- define "kvpull.domain" -}}{{ .Release.Namespace }}.svc.{{ .Values.router.clusterDomain }}{{- end -}}
{{- define "kvpull.gateway" -}}
{{- if .Values.doctor.gateway }}{{ .Values.doctor.gateway }}
{{- else if .Values.router.proxy.enabled -}}
http://{{ include "kvpull.proxy" . }}.{{ include "kvpull.domain" . }}:{{ int .Values.router.proxy.port }}
{{- end -}}
{{- end -}}

{{/* Where spans go, as OpenTelemetry's own variables. Argument: list of context and service; needs POD_NAME before it. */}}
{{- define "kvpull.tracingEnv" -}}
{{- $tracing := (index . 0).Values.router.tracing -}}
{{- if $tracing.enabled }}
- {name: OTEL_SERVICE_NAME, value: {{ index . 1 }}}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ $tracing.otelExporterEndpoint | quote }}}
- {name: OTEL_RESOURCE_ATTRIBUTES, value: "k8s.namespace.name={{ (index . 0).Release.Namespace }},k8s.pod.name=$(POD_NAME)"}
- {name: OTEL_TRACES_SAMPLER, value: {{ $tracing.sampling.sampler }}}
- {name: OTEL_TRACES_SAMPLER_ARG, value: {{ $tracing.sampling.samplerArg | quote }}}
{{- end }}
{{- end -}}

{{/* Port of the collector. */}}
{{- define "kvpull.collectorPort" -}}
{{- $url := urlParse .Values.router.tracing.otelExporterEndpoint -}}
{{- regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default (ternary "443" "80" (eq $url.scheme "https")) -}}
{{- end -}}

{{/* Comma separated target ports. */}}
{{- define "kvpull.targetPorts" -}}
{{- $ports := list -}}
{{- range .Values.router.modelServers.targetPorts }}{{ $ports = append $ports (int .number) }}{{ end -}}
{{- join "," $ports -}}
{{- end -}}

{{/* Parameters of token-producer, as YAML. */}}
{{- define "kvpull.tokenProducer" -}}
{{- $tokenizer := .Values.router.tokenizer -}}
{{- if $tokenizer.enabled -}}
vllm: {url: "http://localhost:{{ int $tokenizer.port }}"}
{{- else if $tokenizer.local.path -}}
local: {path: {{ $tokenizer.local.path | quote }}}
{{- else -}}
vllm: {pool: true}
{{- end -}}
{{- end -}}

{{/* name=value flags out of a map, sorted; numbers as they were written. Argument: the map. */}}
{{- define "kvpull.flags" -}}
{{- range $name, $value := . }}
{{- if kindIs "slice" $value }}
{{- range $value }}
- {{ printf "--%s=%s" $name (include "kvpull.scalar" .) | quote }}
{{- end }}
{{- else }}
- {{ printf "--%s=%s" $name (include "kvpull.scalar" $value) | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A whole number without an exponent: 1e6 is 1000000. */}}
{{- define "kvpull.scalar" -}}
{{- if and (kindIs "float64" .) (eq (float64 .) (float64 (int64 .))) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{/* Values are settled here, not when a pod crashes. */}}
{{- define "kvpull.valid" -}}
{{- $router := .Values.router -}}
{{- if not $router.modelServers.matchLabels -}}
{{- fail "router.modelServers.matchLabels: give the labels of the engines' pods, such as {app: llama}" -}}
{{- end -}}
{{- if and (not (include "kvpull.pool" .)) (not $router.proxy.enabled) -}}
{{- fail "router.inferencePool: with create false give the name of the pool to attach to, or enable router.proxy to do without a pool" -}}
{{- end -}}
{{- if and (not $router.epp.secureServing) (has .Values.provider.name (list "gke" "kgateway")) -}}
{{- fail (printf "router.epp.secureServing: %s always speaks TLS to a picker; leave it true" .Values.provider.name) -}}
{{- end -}}
{{- if and $router.epp.certSecret (not $router.epp.secureServing) -}}
{{- fail "router.epp.certSecret needs router.epp.secureServing" -}}
{{- end -}}
{{- if and $router.epp.metricsTls.clientCaSecret (not $router.epp.metricsTls.certSecret) -}}
{{- fail "router.epp.metricsTls.clientCaSecret needs router.epp.metricsTls.certSecret" -}}
{{- end -}}
{{- if and $router.epp.metricsTls.certSecret (not .Values.doctor.tlsSecret) -}}
{{- fail "router.epp.metricsTls.certSecret: doctor.tlsSecret has to say by which authority the doctor knows the pickers" -}}
{{- end -}}
{{- if gt (int $router.epp.lameDuckSeconds) (int $router.epp.drainTimeoutSeconds) -}}
{{- fail "router.epp.lameDuckSeconds is part of drainTimeoutSeconds and cannot be longer" -}}
{{- end -}}
{{- $pool := $router.inferencePool -}}
{{- if and (hasKey $router.epp.flags "cache-salt-header") $pool.create (eq $pool.failureMode "FailOpen") -}}
{{- fail "router.inferencePool.failureMode: FailOpen would pass clients' own cache salts on while no picker answers; cache-salt-header needs FailClose" -}}
{{- end -}}
{{- if and $router.tokenizer.enabled (not $router.tokenizer.modelName) -}}
{{- fail "router.tokenizer.modelName: name the model that the tokenizer loads" -}}
{{- end -}}
{{- if and $router.proxy.enabled (ne .Values.provider.name "none") -}}
{{- fail "router.proxy.enabled is for use without a gateway: leave provider.name none" -}}
{{- end -}}
{{- if gt (int $router.epp.autoscaling.minReplicas) (int $router.epp.autoscaling.maxReplicas) -}}
{{- fail "router.epp.autoscaling.minReplicas is above maxReplicas" -}}
{{- end -}}
{{- if and $router.epp.autoscaling.enabled (eq (include "kvpull.haMode" .) "active-passive") -}}
{{- fail "router.epp.autoscaling: with haMode active-passive only one picker serves, more of them help nobody" -}}
{{- end -}}
{{- $istio := .Values.provider.istio.stripRoutingHeaders -}}
{{- if and $istio.enabled (not $istio.gatewayLabels) -}}
{{- fail "provider.istio.stripRoutingHeaders.gatewayLabels: give the labels of the gateway's pods" -}}
{{- end -}}
{{- if and .Values.calibration.enabled (not (and .Values.calibration.source .Values.calibration.destination)) -}}
{{- fail "calibration: give source and destination, the URLs of two idle engines" -}}
{{- end -}}
{{- if and .Values.calibration.apply .Values.thresholds.spec -}}
{{- fail "calibration.apply writes the ConfigMap that thresholds.spec is the content of: leave thresholds.spec empty" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.gateway) (not $router.proxy.enabled) -}}
{{- fail "networkPolicy.gateway: say who the gateway is, or nobody can reach the pickers" -}}
{{- end -}}
{{- include "kvpull.validConfig" . -}}
{{- end -}}

{{- define "kvpull.validConfig" -}}
{{- $epp := .Values.router.epp -}}
{{- $shipped := printf "files/plugins/%s" $epp.pluginsConfigFile -}}
{{- if not (or $epp.pluginsConfig (hasKey $epp.pluginsCustomConfig $epp.pluginsConfigFile) (.Files.Get $shipped)) -}}
{{- fail (printf "router.epp.pluginsConfigFile: %s is neither in pluginsCustomConfig nor one that comes with the chart" $epp.pluginsConfigFile) -}}
{{- end -}}
{{- if .Values.engine.enabled -}}
{{- if not .Values.engine.modelName -}}
{{- fail "engine.modelName: name the model to serve" -}}
{{- end -}}
{{- if ne (len .Values.router.modelServers.targetPorts) (int .Values.engine.sizing.dataParallelSize) -}}
{{- fail "router.modelServers.targetPorts: one port for each of engine.sizing.dataParallelSize engines in a pod" -}}
{{- end -}}
{{- include "kvpull.validPorts" . -}}
{{- $sizes := include "kvpull.sizes" . | fromYaml -}}
{{- $tiers := mul $sizes.cpuTierBytes (int .Values.engine.sizing.dataParallelSize) -}}
{{- if lt (int64 $sizes.shmBytes) (int64 $tiers) -}}
{{- fail (printf "engine.sizing.shmGiB: /dev/shm (%d bytes) is below the pod's CPU tiers (%d bytes): engines would end with a bus error" (int64 $sizes.shmBytes) (int64 $tiers)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Every port of an engine's pod, for every rank: one that is given out twice ends the render. */}}
{{- define "kvpull.validPorts" -}}
{{- $engine := .Values.engine -}}
{{- $ranks := int $engine.sizing.dataParallelSize -}}
{{- $plan := list (list "engine.sidecar.metricsPort" $engine.sidecar.metricsPort 1) -}}
{{- range $name := list "port" "eventsPort" "replayPort" "p2pPort" "reportsPort" -}}
{{- $plan = append $plan (list (printf "engine.%s" $name) (get $engine $name) $ranks) -}}
{{- end -}}
{{- range $rank, $port := .Values.router.modelServers.targetPorts -}}
{{- $plan = append $plan (list (printf "router.modelServers.targetPorts[%d]" $rank) $port.number 1) -}}
{{- end -}}
{{- if eq $engine.sidecar.kvConnector "nixlv2" -}}
{{- $plan = append $plan (list "NIXL's side channel" 5600 (mul $ranks (int $engine.sizing.tensorParallelSize))) -}}
{{- end -}}
{{- $taken := dict -}}
{{- range $row := $plan -}}
{{- range $rank := until (int (index $row 2)) -}}
{{- $port := add (int64 (index $row 1)) $rank | toString -}}
{{- if hasKey $taken $port -}}
{{- fail (printf "%s: port %s (rank %d) is taken by %s" (index $row 0) $port $rank (get $taken $port)) -}}
{{- end -}}
{{- $_ := set $taken $port (index $row 0) -}}
{{- end -}}
{{- end -}}
{{- end -}}
