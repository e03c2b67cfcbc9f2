"""What the two listeners do to a client's headers before the picker sees them."""

from __future__ import annotations

from typing import Any

from deploy.local import envoy
from deploy.local.ports import AddressPlan
from epp.extproc import wire as extproc_wire
from sidecar import wire as sidecar_wire


def _filters(name: str) -> list[dict[str, Any]]:
    document = envoy.bootstrap(AddressPlan().control)
    listener = next(item for item in document["static_resources"]["listeners"] if item["name"] == name)
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return list(manager["http_filters"])


def test_gateway_strips_every_routing_header_before_the_picker() -> None:
    filters = _filters("gateway")
    names = [item["name"] for item in filters]
    assert names.index("envoy.filters.http.header_mutation") < names.index(extproc_wire.ATTRIBUTES_NAMESPACE)
    removed = {
        mutation["remove"] for mutation in filters[0]["typed_config"]["mutations"]["request_mutations"]
    }
    assert removed == {*sidecar_wire.ROUTING_HEADERS, extproc_wire.DESTINATION}


def test_lab_listener_strips_nothing_and_turns_its_header_into_the_subset_hint() -> None:
    filters = _filters("lab")
    assert "envoy.filters.http.header_mutation" not in [item["name"] for item in filters]
    (rule,) = filters[0]["typed_config"]["request_rules"]
    assert rule["header"] == envoy.LAB_SUBSET_HEADER
    assert rule["remove"] is True
    present = rule["on_header_present"]
    assert (present["metadata_namespace"], present["key"]) == (
        extproc_wire.SUBSET_NAMESPACE,
        extproc_wire.SUBSET_KEY,
    )


def test_bodies_are_exchanged_in_full_duplex_with_trailers() -> None:
    picker = next(f for f in _filters("gateway") if f["name"] == extproc_wire.ATTRIBUTES_NAMESPACE)
    mode = picker["typed_config"]["processing_mode"]
    assert mode["request_body_mode"] == mode["response_body_mode"] == "FULL_DUPLEX_STREAMED"
    assert mode["request_trailer_mode"] == mode["response_trailer_mode"] == "SEND"
