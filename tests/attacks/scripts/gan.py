"""A GAN: the generator's backward pass leaves gradients on the discriminator, which are zeroed before its own."""

import torch
from torch import nn
from torch.nn import functional

device = "cuda" if torch.cuda.is_available() else "cpu"


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 256)
        )

    def forward(self, x):
        return self.layers(x)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1)
        )

    def forward(self, x):
        return self.layers(x)


torch.manual_seed(0)
generator, discriminator = Generator().to(device), Discriminator().to(device)
of_generator = torch.optim.SGD(generator.parameters(), lr=0.05)
of_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.05)
ones, zeros = torch.ones(64, 1).to(device), torch.zeros(64, 1).to(device)
for step in range(4):
    real, noise = torch.randn(64, 256).to(device), torch.randn(64, 64).to(device)
    of_discriminator.zero_grad()
    fake = generator(noise)
    loss = functional.binary_cross_entropy_with_logits(discriminator(real), ones)
    loss = loss + functional.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
    loss.backward()
    of_discriminator.step()
    of_generator.zero_grad()
    fooled = functional.binary_cross_entropy_with_logits(discriminator(fake), ones)
    fooled.backward()
    of_generator.step()
    print(f"loss {loss.item():.9f} {fooled.item():.9f}")
total = [p for model in (generator, discriminator) for p in model.parameters()]
print(f"weights {sum(float(p.detach().double().abs().sum()) for p in total):.6f}")
