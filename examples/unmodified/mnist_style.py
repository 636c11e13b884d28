"""A small convolutional network learns to read digits: arguments, epochs, a test after each, a file at the end.

The digits are drawn here, shifted and noisy, so that nothing has to be downloaded. The script knows nothing of
gradvitals:

    python examples/unmodified/mnist_style.py --epochs 2
    gradvitals run examples/unmodified/mnist_style.py --epochs 2
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

SHAPES = (
    "###|#.#|#.#|#.#|###",
    ".#.|##.|.#.|.#.|###",
    "###|..#|###|#..|###",
    "###|..#|.##|..#|###",
    "#.#|#.#|###|..#|..#",
    "###|#..|###|..#|###",
    "###|#..|###|#.#|###",
    "###|..#|.#.|.#.|.#.",
    "###|#.#|###|#.#|###",
    "###|#.#|###|..#|###",
)


class Digits(Dataset):
    """Digits of 15 by 9 pixels, somewhere in pictures of 20 by 20 pixels with noise."""

    def __init__(self, size, seed):
        self.size, self.seed = size, seed
        rows = [[[float(pixel == "#") for pixel in row] for row in shape.split("|")] for shape in SHAPES]
        self.shapes = torch.tensor(rows).repeat_interleave(3, 1).repeat_interleave(3, 2)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        digit, down, right = torch.randint(0, 2520, (3,), generator=random).tolist()
        picture = 0.3 * torch.randn(1, 20, 20, generator=random)
        down, right = down % 6, right % 12
        picture[0, down : down + 15, right : right + 9] += self.shapes[digit % 10]
        return picture, digit % 10


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(16 * 8 * 8, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout(torch.flatten(x, 1))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            seen, size = batch_idx * len(data), len(train_loader.dataset)
            print(f"Train Epoch: {epoch} [{seen}/{size}]\tLoss: {loss.item():.6f}")
            if args.dry_run:
                break


def test(model, device, test_loader):
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1).eq(target).sum().item()
    size = len(test_loader.dataset)
    print(f"\nTest set: Average loss: {test_loss / size:.4f}, Accuracy: {correct}/{size}\n")


def main():
    parser = argparse.ArgumentParser(description="Digits, in the style of the MNIST example")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N")
    parser.add_argument("--epochs", type=int, default=3, metavar="N")
    parser.add_argument("--size", type=int, default=2048, metavar="N", help="pictures in an epoch")
    parser.add_argument("--lr", type=float, default=1.0, metavar="LR")
    parser.add_argument("--gamma", type=float, default=0.7, metavar="M", help="learning rate step gamma")
    parser.add_argument("--optimizer", choices=("adadelta", "sgd"), default="adadelta")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes that load data")
    parser.add_argument("--no-cuda", action="store_true")
    parser.add_argument("--dry-run", action="store_true", help="one batch an epoch")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--log-interval", type=int, default=10, metavar="N")
    parser.add_argument("--save-model", metavar="FILE")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.no_cuda else "cpu")
    train_loader = DataLoader(Digits(args.size, 1), args.batch_size, shuffle=True, num_workers=args.workers)
    test_loader = DataLoader(Digits(256, 2), 128, num_workers=args.workers)

    model = Net().to(device)
    make = optim.SGD if args.optimizer == "sgd" else optim.Adadelta
    optimizer = make(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()

    if args.save_model:
        torch.save(model.state_dict(), args.save_model)


if __name__ == "__main__":
    main()
