"""Which shapes are captured: each batch takes the smallest that holds it, and no shape is there in vain."""

from service.inference.buckets import MAX_TOKENS, ROWS, TOKENS, Bucket, bucket_of, buckets, smaller


def test_a_batch_takes_the_smallest_shape_that_holds_it() -> None:
    for rows in range(1, ROWS[-1] + 1):
        for tokens in range(1, TOKENS[-1] + 1, 7):
            found = bucket_of(rows, tokens)
            assert found == Bucket(
                min(one for one in ROWS if one >= rows), min(one for one in TOKENS if one >= tokens)
            )
    assert bucket_of(ROWS[-1] + 1, 1) is None
    assert bucket_of(1, TOKENS[-1] + 1) is None


def test_the_next_smaller_shape_holds_no_batch_that_takes_the_larger() -> None:
    for bucket in (Bucket(rows, tokens) for rows in ROWS for tokens in TOKENS):
        below = smaller(bucket)
        assert bucket_of(below.rows, below.tokens) == below
        assert below.rows < bucket.rows or bucket.rows == ROWS[0]
        assert below.tokens < bucket.tokens or bucket.tokens == TOKENS[0]
        assert bucket_of(below.rows + 1, below.tokens + 1) in (
            bucket,
            bucket_of(bucket.rows, bucket.tokens),
        ) or (bucket.rows == ROWS[0] or bucket.tokens == TOKENS[0])
    assert smaller(Bucket(1, 16)) == Bucket(1, 16)
    assert smaller(Bucket(2, 32)) == Bucket(1, 16)
    assert smaller(Bucket(64, 512)) == Bucket(48, 384)


def test_every_shape_that_a_batch_can_take_is_captured_and_no_other() -> None:
    for max_tokens, positions, most in ((128, 512, 1024), (512, 512, 16384), (20, 512, 40), (300, 256, 4096)):
        takes = {
            bucket_of(rows, tokens)
            for rows in range(1, ROWS[-1] + 1)
            for tokens in range(1, min(max_tokens, TOKENS[-1]) + 1)
            if rows * tokens <= most or rows == 1
        }
        wanted = {one for one in takes if one and one.padded <= MAX_TOKENS and one.tokens <= positions}
        found = list(buckets(max_tokens, positions, most))
        assert set(found) == wanted
        assert len(set(found)) == len(found)
        assert [one.padded for one in found] == sorted(one.padded for one in found)
