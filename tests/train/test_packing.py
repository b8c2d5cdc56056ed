"""Packed rows hold every prediction of every document once; `test_conversations` has their loss."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from train.data import stream, text
from train.data.packing import Packed, pack

END = 0


def documents(seed: int, number: int, longest: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, longest, number)
    return [np.append(rng.integers(1, 40, size), END) for size in sizes]


@given(st.lists(st.integers(1, 16), min_size=1, max_size=60))
def test_every_item_is_in_one_row_that_holds_it(lengths):
    rows = pack(lengths, 16)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in row) <= 16 for row in rows)


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_every_prediction_is_made_once_within_its_document(seed, number):
    texts = documents(seed, number, 30)
    packed = Packed(np.concatenate(texts), 12, end_of_text=END)
    batch = packed.read(np.arange(len(packed)), np.zeros((len(packed), 3)))
    predicted = batch["targets"] >= 0
    pairs = zip(batch["tokens"][predicted], batch["targets"][predicted], strict=True)
    expected = [pair for one in texts for pair in itertools.pairwise(one)]
    assert sorted(pairs) == sorted(expected)
    begins = np.diff(batch["documents"], axis=1, prepend=-1) > 0
    assert ((batch["positions"] == 0) == begins).all()
    # Within a document, the next token is the target.
    follows = ~begins[:, 1:] & predicted[:, :-1]
    assert (batch["tokens"][:, 1:] == batch["targets"][:, :-1])[follows & predicted[:, 1:]].all()


def test_rows_cost_more_alike_than_windows_of_the_same_text():
    texts = documents(5, 400, 300)
    tokens = np.concatenate(texts)
    packed, windows = (
        Packed(tokens, 512, end_of_text=END),
        text.Windows(tokens, 512, end_of_text=END),
    )

    def spread(rows):
        numbers = rows.read(np.arange(len(rows)), np.zeros((len(rows), 3)))["documents"]
        cost = np.array([np.square(np.bincount(row)).sum() for row in numbers], float)
        return cost.std() / cost.mean()

    assert spread(packed) < 0.75 * spread(windows)
    assert len(packed) <= 1.1 * len(windows)


def attention(batch: dict[str, np.ndarray], shards: int, microbatches: int) -> np.ndarray:
    """Pairs of tokens that see each other, of each shard's microbatches."""
    numbers, predicted = batch["documents"], batch["targets"] >= 0
    pairs = [
        np.square(np.bincount(row[of])).sum() for row, of in zip(numbers, predicted, strict=True)
    ]
    return np.reshape(pairs, (shards, -1, microbatches)).sum(axis=1)


def test_shards_and_microbatches_get_as_much_attention():
    """Compares the rows of the same batches, also after a resume, where a text of long documents
    and one of short ones are mixed."""
    texts = documents(5, 60, 1024), documents(6, 600, 100)
    packed = [Packed(np.concatenate(one), 1024, end_of_text=END) for one in texts]
    examples = stream.Mixture(packed, [1.0, 1.0])
    options = {"batch_size": 64, "seed": 3}
    drawn, dealt = (stream.batches(examples, **options, parts=parts) for parts in ((1, 1), (4, 4)))
    excess = []
    for _ in range(8):
        position = dealt.get_state()
        of_both = batch, even = next(drawn), next(dealt)
        assert sorted(batch["tokens"].tolist()) == sorted(even["tokens"].tolist())
        pairs = [attention(one, 4, 4) for one in of_both]
        excess.append([one.max() / one.mean() - 1 for w in pairs for one in (w, w.sum(axis=1))])
    few = stream.batches(examples, **options, rows=[40, 7], parts=(4, 4))
    few.set_state(position)
    assert (next(few)["tokens"] == even["tokens"][[40, 7]]).all()
    of_drawn, shards_drawn, of_dealt, shards_dealt = np.mean(excess, axis=0)
    assert of_dealt < 0.5 * of_drawn
    assert shards_dealt < 0.25 * shards_drawn


def test_windows_with_targets_are_the_same_text():
    tokens = np.array([5, 6, END, 7, 8, 9, END, 4, 3])
    rows = text.Windows(tokens, 8, end_of_text=END, with_targets=True)
    batch = rows.read(np.array([0]), np.zeros((1, 3)))
    assert batch["tokens"][0].tolist() == tokens[:-1].tolist()
    assert batch["targets"][0].tolist() == tokens[1:].tolist()
    assert batch["positions"][0].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
