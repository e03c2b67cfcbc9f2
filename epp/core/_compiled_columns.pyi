"""Types of the compiled columns, for readers and mypy; see `_compiled_columns.pyx`."""

from epp.core.pure_columns import add_weighted as add_weighted
from epp.core.pure_columns import candidate_rows as candidate_rows
from epp.core.pure_columns import largest as largest
from epp.core.pure_columns import match_rows as match_rows
from epp.core.pure_columns import matched_shares as matched_shares
from epp.core.pure_columns import servable_tokens as servable_tokens
from epp.core.pure_columns import within_reach as within_reach
