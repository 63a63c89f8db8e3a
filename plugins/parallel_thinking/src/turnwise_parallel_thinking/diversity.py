"""Self-BLEU, a measure of the similarity of a block's paths (Zhu et al., arXiv:1802.01886)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

_MAX_ORDER = 4


def self_bleu(texts: Sequence[str]) -> float:
    """Return the mean BLEU-4 of each text against the others, in 0..1; 0 for fewer than two."""
    words = [text.split() for text in texts]
    if len(words) < 2:
        return 0.0
    scores = [_bleu(own, [*words[:index], *words[index + 1 :]]) for index, own in enumerate(words)]
    return sum(scores) / len(scores)


def _bleu(own: Sequence[str], others: Sequence[Sequence[str]]) -> float:
    """Return BLEU with smoothed counts above order 1 (one is added), because short texts would otherwise score 0."""
    if not own:
        return float(any(not other for other in others))
    logs = []
    for order in range(1, _MAX_ORDER + 1):
        counts = _ngrams(own, order)
        most: Counter[tuple[str, ...]] = Counter()
        for other in others:
            most |= _ngrams(other, order)
        matched, total = (counts & most).total(), counts.total()
        if order > 1:
            matched, total = matched + 1, total + 1
        if not matched:
            return 0.0
        logs.append(math.log(matched / total))
    closest = min((abs(len(other) - len(own)), len(other)) for other in others)[1]
    return min(1.0, math.exp(1 - closest / len(own))) * math.exp(sum(logs) / len(logs))


def _ngrams(words: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + order]) for i in range(len(words) - order + 1))
