{{/*
Bytes of the CPU tier of an engine, of /dev/shm and of memory of a pod: the arithmetic of `kvpull size` (epp/sizing/plan.py),
in whole GiB. A test compares the two.
*/}}
{{- define "kvpull.sizes" -}}
{{- $s := .Values.engine.sizing -}}
{{- $gib := 1073741824 -}}
{{- $tier := int64 (round (mulf $s.cpuTierGiB $gib) 0) -}}
{{- if eq $tier 0 -}}
{{- $device := int64 (round (mulf $s.deviceKvTokens $s.kvBytesPerToken) 0) -}}
{{- $tier = include "kvpull.wholeGiB" (mul 2 $device) -}}
{{- end -}}
{{- $shm := int64 (mul (int64 $s.shmGiB) $gib) -}}
{{- if eq $shm 0 -}}
{{- $tiers := mul (int64 $tier) (int64 $s.dataParallelSize) -}}
{{- $shm = include "kvpull.wholeGiB" (div (add (mul $tiers 12) 10) 11) -}}
{{- end -}}
{{- $base := int64 (round (mulf $s.baseMemoryGiB $gib) 0) -}}
cpuTierBytes: {{ int64 $tier }}
shmBytes: {{ int64 $shm }}
memoryBytes: {{ include "kvpull.wholeGiB" (add (int64 $shm) $base) }}
{{- end -}}

{{/* Rounded up, in bytes. */}}
{{- define "kvpull.wholeGiB" -}}
{{- $gib := 1073741824 -}}
{{- mul (div (add (int64 .) (sub $gib 1)) $gib) $gib -}}
{{- end -}}
