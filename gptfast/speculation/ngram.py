"""Prompt lookup: what followed the last tokens where they stood before will follow them again.

No second model is needed. It pays where the output repeats the prompt or itself: editing, summarizing, code.
"""

from __future__ import annotations

from collections.abc import Sequence

ROOT = 0


class NgramProposer:
    """Proposes what followed the longest earlier occurrence of the text's end; of equally long ones, the latest.

    The index is a tree of n-grams read backwards: a child is one token longer to the left. A node knows where its
    n-gram ended last. Indexing a token walks at most `max_length` nodes down from the root. A node gets children once
    its n-gram occurs twice, so text that does not repeat itself takes about one node per token.

    The defaults suit SmolLM2-135M's answers to tests/data/speculation_prompts.json. Where there is nothing to copy, a
    minimum of 1 has about half the share of tokens accepted, and one of 3 leaves out every third proposal; a maximum
    above 16 changes hardly any.

    Args:
        min_length: a match of fewer tokens proposes nothing.
        max_length: how much of a match counts; between longer ones, the latest is taken.
    """

    def __init__(self, *, min_length: int = 2, max_length: int = 16) -> None:
        assert 1 <= min_length <= max_length
        self._min_length = min_length
        self._max_length = max_length
        self._asked = 0
        self._clear()

    def begin(self, tokens: Sequence[int]) -> None:
        """Index the prompt."""
        self.propose(tokens, 0)

    def propose(self, tokens: Sequence[int], k: int, sampler: object = None) -> list[int]:
        """At most `k` tokens that may follow `tokens`, which are all tokens of the text so far, prompt and output.

        Tokens that the last call did not have are indexed; another text is indexed anew. No tokens are returned if the
        last `min_length` did not occur before. `sampler` is not used, as nothing is sampled.
        """
        if not self._goes_on(tokens):
            self._clear()
        for token in tokens[len(self._text) :]:
            self._append(token)
        self._asked = k
        if self._match_length < self._min_length:
            return []
        # A copy that reaches the end of the text goes on with what it has copied, as for "abcabcab".
        period = len(self._text) - self._match_end
        return [self._text[self._match_end + i % period] for i in range(k)]

    def _clear(self) -> None:
        self._text: list[int] = []
        self._children: dict[tuple[int, int], int] = {}
        self._ends = [0]  # of each node, behind the last token of its n-gram
        self._match_length = self._match_end = 0

    def _goes_on(self, tokens: Sequence[int]) -> bool:
        """Whether `tokens` begins with the indexed text.

        A decoding step adds what was proposed and one token at most. If there is no more, only the end of the indexed
        text is compared, so that a step does not cost the length of the text.
        """
        known = len(self._text)
        is_step = 0 < len(tokens) - known <= self._asked + 1
        start = max(0, known - self._max_length) if is_step else 0
        return list(tokens[start:known]) == self._text[start:]

    def _append(self, token: int) -> None:
        """Index the n-grams that end with `token`, and find the longest of them that occurred before."""
        text = self._text
        text.append(token)
        self._match_length = 0
        end, node, earlier = len(text), ROOT, 0
        for length in range(1, min(self._max_length, end) + 1):
            if earlier >= length:  # the n-gram occurs twice now; the first time, it got no children
                self._find_child(node, text[earlier - length], earlier)
            node = self._find_child(node, text[end - length], end)
            earlier = self._ends[node]
            if earlier == end:
                return
            self._ends[node] = end
            self._match_length, self._match_end = length, earlier

    def _find_child(self, node: int, token: int, end: int) -> int:
        """The child of `node` with `token` to the left; made, with an n-gram that ended at `end`, if it is missing."""
        child = self._children.setdefault((node, token), len(self._ends))
        if child == len(self._ends):
            self._ends.append(end)
        return child
