"""What errors show of texts that ranks do not have alike."""

from fdtensor.runtime.digests import Digest, digest_of, lines_of, windows


def test_short_texts_are_shown_whole():
    assert windows({0: "a", 3: "b"}) == {0: "a", 3: "b"}


def test_long_texts_are_shown_around_the_first_letter_that_differs():
    head, tail = "h" * 500, "t" * 500
    shown = windows({0: f"{head}x{tail}", 1: f"{head}y{tail}"})
    assert [text.index(letter) for text, letter in zip(shown.values(), "xy", strict=True)] == [
        64
    ] * 2
    assert all(text.startswith("... h") and text.endswith("t ...") for text in shown.values())
    assert all(len(text) == 308 for text in shown.values())


def test_a_text_that_is_the_start_of_another_is_shown_at_its_end():
    shown = windows({0: "h" * 500, 1: "h" * 500 + "x"})
    assert shown == {0: "... " + "h" * 60, 1: "... " + "h" * 60 + "x"}


def test_a_fingerprint_is_a_str_that_keeps_what_it_is_of():
    digest = digest_of("a\n  b  c")
    assert digest == str(digest) == digest_of("a\n  b  c")
    assert lines_of(digest) == ["a", "b c"]
    assert lines_of(Digest("0", 1, "b\nc")) == ["1", "b", "c"]
    assert lines_of("0123") == []
