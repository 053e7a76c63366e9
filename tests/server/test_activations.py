"""What sets the size of the workspace is named, and what smaller batch sizes would leave."""

from cohabit.server.activations import Activations, workspace_words

MIB = 1 << 20


def taken(model: str, mebibytes: dict[int, float], sizes: str = "") -> list[Activations]:
    return [Activations(model, batch, f"{batch}{sizes}", int(n * MIB)) for batch, n in mebibytes.items()]


def test_the_model_its_bucket_and_each_saving_are_named() -> None:
    found = [*taken("bert", {1: 4, 2: 8, 4: 16, 8: 32}, "x512"), *taken("cnn", {1: 5, 2: 6, 4: 7, 8: 8})]
    assert workspace_words(found) == (
        "32.0 MiB for activations of bert at batch 8 with dynamic sizes 512; 16.0 MiB with --batch-sizes 1,2,4, 8.0 MiB"
        " with --batch-sizes 1,2, 5.0 MiB with --batch-sizes 1 (for one model: max_batch_size of its config.pbtxt);"
        " less with smaller dynamic sizes (import with --max-sequence-length, or --shape-buckets)"
    )


def test_what_saves_nothing_is_not_offered() -> None:
    assert workspace_words(taken("a", {1: 4, 8: 4.2})) == "4.2 MiB for activations of a at batch 8"
    only_large = [*taken("fixed", {16: 32}), *taken("small", {1: 1, 2: 2})]
    assert workspace_words(only_large) == "32.0 MiB for activations of fixed at batch 16"
    assert workspace_words([]) == ""
