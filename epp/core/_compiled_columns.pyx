# cython: language_level=3, embedsignature=False, boundscheck=False, wraparound=False
"""Compiled twin of `pure_columns`: the same answers in a third of the time (docs/figures.md).

Rows are tuples of known types and are read by position; anything else is a TypeError. Lists are walked by
index, with lengths checked first. The GIL is held throughout.
"""

from cpython.ref cimport Py_INCREF, PyTypeObject
from cpython.tuple cimport PyTuple_Check, PyTuple_GET_ITEM, PyTuple_GET_SIZE, PyTuple_SET_ITEM
from libc.math cimport isfinite

from epp.core.index_interface import Depths
from epp.core.types import NO_MATCH, Candidate, ClaimState, PrefixMatch

cdef extern from *:
    """
    static PyObject *new_row(PyTypeObject *type, Py_ssize_t size) { return type->tp_alloc(type, size); }
    """
    object new_row(PyTypeObject *kind, Py_ssize_t size)

cdef PyTypeObject *_CANDIDATE = <PyTypeObject *>Candidate
cdef PyTypeObject *_MATCH = <PyTypeObject *>PrefixMatch
cdef object _LIVE = ClaimState.LIVE
cdef object _PARTIAL = ClaimState.PARTIAL
cdef object _NO_MATCH = NO_MATCH
cdef object _NO_DEPTHS = Depths()
cdef object _NONE_EXPECTED = 0
cdef object _NOTHING = 0.0

cdef enum:  # places in a Candidate, a PrefixMatch, Depths and a Standing
    ROW_MATCH = 3
    ROW_SIZE = 5
    STATE = 0
    BLOCKS = 1
    DEVICE_BLOCKS = 2
    CPU_BLOCKS = 3
    BLOCK_SIZE = 4
    FROM_EMPTY = 5
    SPECULATIVE = 6
    MATCH_SIZE = 7
    DEPTHS_SIZE = 3
    STANDING_SIZE = 4
    _MOST = 64  # of a `largest`


cdef inline int _need(object row, Py_ssize_t size) except -1:
    if not PyTuple_Check(row) or PyTuple_GET_SIZE(row) != size:
        raise TypeError("a row of another kind")
    return 0


cdef inline void _put(object row, Py_ssize_t place, object value):
    Py_INCREF(value)  # the tuple takes a reference of its own
    PyTuple_SET_ITEM(row, place, value)


cdef inline object _at(object row, Py_ssize_t place):
    return <object>PyTuple_GET_ITEM(row, place)


def match_rows(endpoints, standings, depths, expected):
    cdef list names = list(endpoints), rows = list(standings)
    cdef dict found = {}, known = dict(depths) if type(depths) is not dict else depths
    cdef dict coming = dict(expected) if type(expected) is not dict else expected
    cdef Py_ssize_t i, count = len(names)
    cdef object name, row, held, more, match
    if len(rows) != count:
        raise ValueError("endpoints and standings differ in number")
    for i in range(count):
        name, row = names[i], rows[i]
        _need(row, STANDING_SIZE)
        if _at(row, 0) is None:
            found[name] = _NO_MATCH
            continue
        held = known.get(name, _NO_DEPTHS)
        _need(held, DEPTHS_SIZE)
        more = coming.get(name, _NONE_EXPECTED) if coming else _NONE_EXPECTED
        match = new_row(_MATCH, MATCH_SIZE)
        _put(match, STATE, _at(row, 0))
        _put(match, BLOCKS, _at(held, 0))
        _put(match, DEVICE_BLOCKS, _at(held, 1))
        _put(match, CPU_BLOCKS, _at(held, 2))
        _put(match, BLOCK_SIZE, _at(row, 1))
        _put(match, FROM_EMPTY, _at(row, 2))
        _put(match, SPECULATIVE, more)
        found[name] = match
    return found


def candidate_rows(endpoints, metrics, loads, matches, placed):
    cdef list columns = [list(endpoints), list(metrics), list(loads), list(matches)]
    cdef list rows = [], column, guesses
    cdef Py_ssize_t i, place, count = len(<list>columns[0])
    cdef object row
    guesses = [_NO_MATCH] * count if placed is None else list(placed)
    columns.append(guesses)
    for column in columns:
        if len(column) != count:
            raise ValueError("columns differ in length")
    for i in range(count):
        row = new_row(_CANDIDATE, ROW_SIZE)
        for place in range(ROW_SIZE):
            _put(row, place, (<list>columns[place])[i])
        rows.append(row)
    return rows


def matched_shares(matches, prompt_tokens, double on_device, double on_cpu):
    cdef list shares = [], rows = list(matches)
    cdef object match, state
    cdef long long tokens = prompt_tokens, size, total, blocks, device, speculative, beyond, near
    for match in rows:
        _need(match, MATCH_SIZE)
        state = _at(match, STATE)
        if state is not _LIVE and state is not _PARTIAL:
            shares.append(None)
            continue
        size = _at(match, BLOCK_SIZE)
        total = tokens // size if size else 0
        if not total:
            shares.append(_NOTHING)
            continue
        blocks, device = _at(match, BLOCKS), _at(match, DEVICE_BLOCKS)
        speculative = _at(match, SPECULATIVE)
        beyond = blocks - device
        near = speculative - beyond if speculative > blocks else device
        shares.append((near * on_device + beyond * on_cpu) / total)
    return shares


def servable_tokens(candidates):
    cdef list found = [], rows = list(candidates)
    cdef object row, match, state
    cdef long long tokens
    for row in rows:
        _need(row, ROW_SIZE)
        match = _at(row, ROW_MATCH)
        _need(match, MATCH_SIZE)
        state = _at(match, STATE)
        tokens = 0
        if state is _LIVE or state is _PARTIAL:
            tokens = _at(match, CPU_BLOCKS) * _at(match, BLOCK_SIZE)
        found.append(tokens)
    return found


def add_weighted(totals, scores, double weight):
    cdef list given = scores if type(scores) is list else list(scores)
    cdef list before = totals if type(totals) is list else list(totals)
    cdef list after = [], kept = None
    cdef Py_ssize_t i, count = len(given)
    cdef double score
    if len(before) != count:
        raise ValueError("scores and totals differ in number")
    for i in range(count):
        score = given[i]
        if not 0.0 <= score <= 1.0:
            if kept is None:
                kept = list(given)
            score = (1.0 if score > 1.0 else 0.0) if isfinite(score) else 0.0
            kept[i] = score
        after.append(<double>before[i] + weight * score)
    return (scores if kept is None else kept), after


def largest(values, Py_ssize_t count):
    cdef list given = values if type(values) is list else list(values), order = []
    cdef Py_ssize_t i, place, kept = 0, most = min(count, _MOST)
    cdef Py_ssize_t[_MOST] at
    cdef double[_MOST] top
    cdef double value
    if count > _MOST:
        raise ValueError("more than is ever recorded")
    for i in range(len(given)):
        value = given[i]
        if kept == most and (not most or value <= top[most - 1]):
            continue
        place = kept if kept < most else most - 1
        while place > 0 and top[place - 1] < value:
            top[place], at[place] = top[place - 1], at[place - 1]
            place -= 1
        top[place], at[place] = value, i
        if kept < most:
            kept += 1
    for i in range(kept):
        order.append(at[i])
    return order


def within_reach(candidates, depths, best):
    cdef list found = [], rows = list(candidates), given = list(depths)
    cdef Py_ssize_t i
    cdef long long limit = best, depth, size
    cdef object row, match
    if len(rows) != len(given):
        raise ValueError("candidates and depths differ in number")
    for i in range(len(given)):
        depth = given[i]
        if depth != limit:
            if depth > limit or depth == 0:
                continue
            row = rows[i]
            _need(row, ROW_SIZE)
            match = _at(row, ROW_MATCH)
            _need(match, MATCH_SIZE)
            size = _at(match, BLOCK_SIZE)
            if depth + size < limit:
                continue
        found.append(i)
    return found
