"""Joint search: what a decoder writes next, weighed with what CTC says of the same beginning of a text."""

import torch
from torch import Tensor
from transformers import LogitsProcessor

NEVER = -1e10  # in place of minus infinity, whose differences are no numbers


class JointSearch(LogitsProcessor):
    """Adds the CTC score of a beginning to that of the decoder, for greedy search and beams of ``generate``.

    The score of a beginning is the log-probability that the text of CTC begins so; that of a whole text, with its end,
    the one that CTC says this and no more. Sums over alignments are kept for every beginning in the beams.

    Args:
        logits: of the CTC head, (batch, time, tokens).
        lengths: positions that count, (batch).
        blank, end: the token of the blank, and of the end of a text.
        weight: of CTC; the decoder has the rest.
        candidates: tokens, the likeliest of the decoder, that are considered for each beginning.

    Source: Watanabe et al., Hybrid CTC/Attention Architecture for End-to-End Speech Recognition (2017), section IV-C.
    """

    def __init__(self, logits: Tensor, lengths: Tensor, blank: int, end: int, weight: float, candidates: int = 40):
        is_padding = torch.arange(logits.shape[1], device=logits.device) >= lengths[:, None]
        scores = logits.float().log_softmax(-1).masked_fill(is_padding[..., None], NEVER)
        scores[..., blank] = scores[..., blank].masked_fill(is_padding, 0.0)
        self.scores, self.blank, self.end, self.weight, self.candidates = scores, blank, end, weight, candidates
        self.known: dict[tuple[int, ...], int] = {}  # (recording, *beginning) to a row of ``last``
        self.prompt = 0  # tokens that the decoder is given
        self.last: tuple[Tensor, Tensor, Tensor] | None = None  # ending in a token, in a blank; score of the beginning

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the joint scores; of tokens that are no candidates they are impossible."""
        if self.last is None:
            self.prompt = input_ids.shape[1]
        input_ids, beams = input_ids[:, self.prompt - 1 :], len(input_ids) // len(self.scores)
        recordings = torch.arange(len(input_ids), device=input_ids.device) // beams
        frame_scores = self.scores[recordings]
        token, blank, prefix_scores = self._advance(input_ids, recordings, frame_scores)
        log_probs = scores.log_softmax(-1)
        count = min(self.candidates, log_probs.shape[1])
        candidates = log_probs.topk(count).indices
        last = input_ids[:, -1:] if input_ids.shape[1] > 1 else torch.full_like(input_ids, -1)
        combined = torch.logaddexp(token, blank)
        previous = torch.where((candidates == last)[:, None], blank[..., None], combined[..., None])
        token_scores = frame_scores.gather(2, candidates[:, None].expand(-1, frame_scores.shape[1], -1))
        extended = (previous[:, :-1] + token_scores[:, 1:]).logsumexp(1)
        if input_ids.shape[1] == 1:
            extended = torch.logaddexp(extended, token_scores[:, 0])
        extended = extended.masked_fill(candidates == self.blank, NEVER)  # no text has it
        extended = torch.where(candidates == self.end, combined[:, -1:], extended)  # which is the same token in Whisper
        joint = (1 - self.weight) * log_probs.gather(1, candidates) + self.weight * (extended - prefix_scores[:, None])
        return torch.full_like(scores, NEVER).scatter(1, candidates, joint.to(scores.dtype))

    def _advance(self, input_ids: Tensor, recordings: Tensor, frame_scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums over alignments of each beginning, from those of the beginning without its last token."""
        prefixes = [(n, *row[1:]) for n, row in zip(recordings.tolist(), input_ids.tolist(), strict=True)]
        silence = frame_scores[..., self.blank]
        if input_ids.shape[1] == 1:
            blank = silence.cumsum(1)
            state = (torch.full_like(blank, NEVER), blank, blank.new_zeros(len(blank)))
        else:
            assert self.last is not None
            parents = torch.tensor([self.known[prefix[:-1]] for prefix in prefixes], device=recordings.device)
            token, blank, _ = (part[parents] for part in self.last)
            last = input_ids[:, -1]
            token_scores = frame_scores.gather(2, last[:, None, None].expand(-1, frame_scores.shape[1], 1)).squeeze(2)
            combined = torch.logaddexp(token, blank)
            if input_ids.shape[1] == 2:
                entry, first = combined, token_scores[:, 0]
            else:
                entry = torch.where((last == input_ids[:, -2])[:, None], blank, combined)
                first = torch.full_like(token_scores[:, 0], NEVER)
            tokens, blanks = [first], [torch.full_like(first, NEVER)]
            for t in range(1, frame_scores.shape[1]):
                blanks.append(torch.logaddexp(blanks[-1], tokens[-1]) + silence[:, t])
                tokens.append(torch.logaddexp(tokens[-1], entry[:, t - 1]) + token_scores[:, t])
            prefix_scores = torch.logaddexp((entry[:, :-1] + token_scores[:, 1:]).logsumexp(1), first)
            state = (torch.stack(tokens, 1), torch.stack(blanks, 1), prefix_scores)
        self.known = {prefix: row for row, prefix in enumerate(prefixes)}
        self.last = state
        return state
