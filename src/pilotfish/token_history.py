"""What penalties need to know of a sequence: which ids stand in it, and how often each was put out."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenHistory:
    """The distinct ids of a prompt and of the output so far; each token costs the same, however many came before."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_token_ids))}
        self._token_ids = array("i", self._places)
        self._output_counts = array("i", bytes(self._token_ids.itemsize * len(self._token_ids)))
        self.num_output_tokens = 0

    def append(self, token_id: int) -> None:
        """One more output token."""
        place = self._places.setdefault(token_id, len(self._token_ids))
        if place == len(self._token_ids):
            self._token_ids.append(token_id)
            self._output_counts.append(0)
        self._output_counts[place] += 1
        self.num_output_tokens += 1

    def counts(self, draft_token_ids: Sequence[int] = ()) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Ids, each once, and how often the output holds each, int32 [m] both, as if the draft were put out too."""
        fresh: dict[int, int] = {}
        places = []
        for token_id in draft_token_ids:
            place = self._places.get(token_id)
            places.append(fresh.setdefault(token_id, len(self._places) + len(fresh)) if place is None else place)
        token_ids = np.append(np.array(self._token_ids, np.int32), np.array(list(fresh), np.int32))
        output_counts = np.append(np.array(self._output_counts, np.int32), np.zeros(len(fresh), np.int32))
        np.add.at(output_counts, places, 1)
        return token_ids, output_counts
