"""Direct preference optimization against a frozen reference model, in the manner of TRL."""

import copy

import torch
from clock import LONGER, Clock
from torch import nn


class LM(nn.Module):
    def __init__(self, vocab=48, width=96):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids):
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        return self.lm_head(self.norm(self.layers(self.embed(input_ids), mask=mask, is_causal=True)))


def logps(model, tokens):
    scores = model(tokens[:, :-1]).log_softmax(-1)
    return scores.gather(2, tokens[:, 1:, None]).squeeze(2).sum(1)


def main():
    torch.manual_seed(0)
    clock, model = Clock(), LM()
    ref_model = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 15))
    for _ in range(120 * LONGER):
        start = torch.randint(48, (16, 1))
        chosen = (start + torch.arange(16)) % 48
        noise = torch.rand(16, 16) < 0.6
        rejected = torch.where(noise, torch.randint(48, (16, 16)), chosen)
        swap = torch.rand(16, 1) < 0.1
        batch = torch.cat([torch.where(swap, rejected, chosen), torch.where(swap, chosen, rejected)])
        policy = logps(model, batch)
        with torch.no_grad():
            reference = logps(ref_model, batch)
        ratios = (policy - reference).chunk(2)
        loss = -nn.functional.logsigmoid(0.1 * (ratios[0] - ratios[1])).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        clock.step(loss.detach())
    clock.end(model)


if __name__ == "__main__":
    main()
