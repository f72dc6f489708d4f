"""Laws of the codecs over random schemas: round trips, order, prefix-freedom, and strict decoding of damaged bytes."""

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.row_codec import RowCodec
from state_backend.formats.spark_hash import key_group, key_hasher
from state_backend.formats.types import parse_struct
from state_backend.values.errors import CorruptFile, UnsupportedFormat
from tests.support.typed_values import all_types, key_rows, rows, same, sort_key

# Time is no law: a loaded machine must not fail a test.
laws = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@laws
@given(rows(all_types), st.integers(0, 255))
def test_rows_round_trip(drawn, version):
    schema, row = drawn
    codec = RowCodec("x", schema, version)
    data = codec.encode(row)
    assert same(codec.decode(data), row)
    assert codec.encode(list(row)) == data
    assert codec.encode(dict(zip(schema.names, row, strict=True))) == data
    assert parse_struct(schema.to_json()) == schema


@laws
@given(rows(all_types), st.data())
@pytest.mark.long("half a second", runs_in="ci")
def test_a_damaged_row_is_refused_or_decodes_to_a_row_of_the_schema(drawn, data):
    """Whatever the bytes: a row of the schema, or CorruptFile, or, of a higher format, UnsupportedFormat, and nothing else."""
    schema, row = drawn
    codec = RowCodec("x", schema, 1)
    encoded = bytearray(codec.encode(row))
    if data.draw(st.booleans(), "truncate"):
        cut = bytes(encoded[: data.draw(st.integers(0, len(encoded) - 1))])
        with pytest.raises(CorruptFile):
            codec.decode(cut)
        return
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    with suppress(CorruptFile, UnsupportedFormat):
        codec.encode(codec.decode(bytes(encoded)))


@laws
@given(rows(all_types), st.binary(max_size=40))
def test_random_bytes_decode_to_a_row_or_raise_corrupt_file(drawn, noise):
    codec = RowCodec("x", drawn[0], 1)
    with suppress(CorruptFile):
        codec.decode(b"\x01\x01" + noise)


@laws
@given(key_rows(2))
@pytest.mark.long("half a second", runs_in="ci")
def test_keys_sort_as_in_spark(drawn):
    schema, a, b = drawn
    codec = KeyCodec(schema)
    left, right = codec.encode(a), codec.encode(b)
    assert (left < right) == (sort_key(a) < sort_key(b))
    assert (left == right) == (sort_key(a) == sort_key(b))
    if left != right:
        assert not left.startswith(right) and not right.startswith(left)
    else:
        assert key_hasher(schema)(a) == key_hasher(schema)(b)


@laws
@given(key_rows(2), st.binary(max_size=3))
@pytest.mark.long("half a second", runs_in="ci")
def test_keys_round_trip_one_behind_the_other(drawn, before):
    schema, a, b = drawn
    codec = KeyCodec(schema)
    first, second = codec.encode(a), codec.encode(b)
    data = before + first + second
    found, at = codec.decode_prefix(data, len(before))
    assert sort_key(found) == sort_key(a)
    assert at == len(before) + len(first)
    found, at = codec.decode_prefix(data, at)
    assert sort_key(found) == sort_key(b)
    assert at == len(data)
    assert codec.encode(codec.decode(first)) == first


@laws
@given(key_rows(), st.data())
@pytest.mark.long("half a second", runs_in="ci")
def test_damaged_keys_are_refused_or_decoded_without_another_error(drawn, data):
    schema, key = drawn
    codec = KeyCodec(schema)
    encoded = codec.encode(key)
    cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    with pytest.raises(CorruptFile):
        codec.decode(cut)
    at = data.draw(st.integers(0, len(encoded) - 1))
    damaged = encoded[:at] + bytes([encoded[at] ^ data.draw(st.integers(1, 255))]) + encoded[at + 1 :]
    with suppress(CorruptFile):
        codec.decode(damaged)


@laws
@given(key_rows(), st.integers(1, 32768))
def test_key_groups_are_in_range(drawn, max_parallelism):
    schema, key = drawn
    assert 0 <= key_group(key, schema, max_parallelism) < max_parallelism
