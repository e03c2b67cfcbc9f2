{{/* Envoy's bootstrap: what deploy/local/envoy.py makes for one machine; a test compares the two. */}}
{{- define "kvpull.envoy" -}}
admin:
  address: {socket_address: {address: 127.0.0.1, port_value: 19000}}
static_resources:
  listeners:
  - name: gateway
    address: {socket_address: {address: 0.0.0.0, port_value: {{ int .Values.router.proxy.port }}}}
    per_connection_buffer_limit_bytes: 32768
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: gateway
          generate_request_id: false
          stream_idle_timeout: 1000s
          route_config:
            name: gateway
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {prefix: /}
                route: {cluster: destinations, timeout: 86400s}
          http_filters:
          - name: envoy.filters.http.health_check
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.health_check.v3.HealthCheck
              pass_through_mode: false
              headers:
              - {name: ":path", string_match: {exact: /kvpull-proxy-ready}}
          - name: envoy.filters.http.header_mutation
            typed_config:
              {{- include "kvpull.stripFilter" . | nindent 14 }}
          - name: envoy.filters.http.ext_proc
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
              grpc_service:
                envoy_grpc: {cluster_name: picker, authority: picker}
                timeout: 1000s
              failure_mode_allow: false
              message_timeout: 1000s
              processing_mode:
                request_header_mode: SEND
                response_header_mode: SEND
                request_body_mode: FULL_DUPLEX_STREAMED
                response_body_mode: FULL_DUPLEX_STREAMED
                request_trailer_mode: SEND
                response_trailer_mode: SEND
              response_attributes: [upstream.address]
              metadata_options:
                forwarding_namespaces: {untyped: [envoy.lb, envoy.lb.subset_hint]}
                receiving_namespaces: {untyped: [envoy.lb]}
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
              suppress_envoy_headers: true
  clusters:
  - name: destinations
    type: ORIGINAL_DST
    connect_timeout: 5s
    lb_policy: CLUSTER_PROVIDED
    circuit_breakers: {thresholds: [{max_connections: 40000, max_pending_requests: 40000, max_requests: 40000}]}
    original_dst_lb_config:
      use_http_header: true
      http_header_name: x-gateway-destination-endpoint
  - name: picker
    type: STRICT_DNS
    connect_timeout: 5s
    lb_policy: LEAST_REQUEST
    circuit_breakers: {thresholds: [{max_connections: 40000, max_pending_requests: 40000, max_requests: 40000}]}
    health_checks:
    - timeout: 1s
      interval: 1s
      no_traffic_interval: 0.2s
      unhealthy_interval: 0.1s
      no_traffic_healthy_interval: 1s
      unhealthy_threshold: 2
      healthy_threshold: 1
      always_log_health_check_failures: false
      grpc_health_check: {service_name: envoy.service.ext_proc.v3.ExternalProcessor}
    {{- if .Values.router.epp.secureServing }}
    transport_socket:
      name: envoy.transport_sockets.tls
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
        common_tls_context: {alpn_protocols: [h2], validation_context: {}}
    {{- end }}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config:
          http2_protocol_options: {initial_stream_window_size: 65536, initial_connection_window_size: 1048576}
    load_assignment:
      cluster_name: picker
      endpoints:
      - lb_endpoints:
        - endpoint:
            address:
              socket_address:
                address: {{ ternary "127.0.0.1" (printf "%s.%s" (include "kvpull.epp" .) (include "kvpull.domain" .)) (eq .Values.router.proxy.mode "sidecar") }}
                port_value: {{ int .Values.router.epp.extProcPort }}
{{- end -}}

{{/* Routing headers are the picker's: what a client sends in them goes no further. */}}
{{- define "kvpull.stripFilter" -}}
"@type": type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation
mutations:
  request_mutations:
  - {remove: x-prefiller-host-port}
  - {remove: x-kv-cache-source-host-port}
  - {remove: x-data-parallel-host-port}
  - {remove: x-encoder-hosts-ports}
  - {remove: x-kvpull-decision-id}
  - {remove: x-kvpull-routing-auth}
  - {remove: x-kvpull-leg}
  - {remove: x-gateway-destination-endpoint}
{{- end -}}

{{- define "kvpull.proxyContainer" -}}
{{- $proxy := .Values.router.proxy -}}
name: envoy
image: {{ include "kvpull.image" (list $proxy.image "latest") | quote }}
imagePullPolicy: {{ $proxy.image.pullPolicy }}
command: [envoy]
args: [-c, /etc/envoy/envoy.yaml, --log-level, warning, --drain-time-s, "30"]
ports:
- {name: http, containerPort: {{ int $proxy.port }}}
readinessProbe:
  httpGet: {path: /kvpull-proxy-ready, port: http}
  periodSeconds: 5
livenessProbe:
  httpGet: {path: /kvpull-proxy-ready, port: http}
  periodSeconds: 10
  failureThreshold: 6
resources:
  {{- toYaml $proxy.resources | nindent 2 }}
securityContext:
  {{- toYaml .Values.router.epp.securityContext | nindent 2 }}
volumeMounts:
- {name: envoy, mountPath: /etc/envoy, readOnly: true}
{{- end -}}
