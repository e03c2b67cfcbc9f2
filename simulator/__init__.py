"""`kvpull simulate`: the product's own picker, in virtual time, in front of modelled engines.

It holds no policy: every placement and every source comes from `epp.core.EndpointPicker`, built from an
EndpointPickerConfig by the product's own reader.
"""
