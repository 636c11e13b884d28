"""A graph convolution on a graph of communities, trained on the whole graph at once, in the manner of PyTorch
Geometric's introduction."""

import torch
from clock import LONGER, Clock
from torch import nn


class GCNConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.lin = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x, edge_index, weight):
        x = self.lin(x)
        source, target = edge_index
        return torch.zeros_like(x).index_add(0, target, x[source] * weight[:, None]) + self.bias


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(64, 64), GCNConv(64, 7)

    def forward(self, x, edge_index, weight):
        x = torch.relu(self.conv1(x, edge_index, weight))
        x = nn.functional.dropout(x, training=self.training)
        return self.conv2(x, edge_index, weight).log_softmax(dim=1)


def main():
    torch.manual_seed(0)
    nodes = 1000
    y = torch.randint(7, (nodes,))
    x = torch.randn(7, 64)[y] + 2 * torch.randn(nodes, 64)
    same = y[:, None] == y[None, :]
    linked = torch.rand(nodes, nodes) < torch.where(same, 0.02, 0.002)
    linked = linked | linked.T | torch.eye(nodes, dtype=torch.bool)
    edge_index = linked.nonzero().T
    degree = linked.sum(0).float()
    weight = (degree[edge_index[0]] * degree[edge_index[1]]).rsqrt()
    train_mask = torch.rand(nodes) < 0.5
    clock, model = Clock(), GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    model.train()
    for _ in range(200 * LONGER):
        optimizer.zero_grad()
        out = model(x, edge_index, weight)
        loss = nn.functional.nll_loss(out[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        clock.step(loss.detach())
    clock.end(model)


if __name__ == "__main__":
    main()
