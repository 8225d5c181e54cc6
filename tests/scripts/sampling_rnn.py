"""Character-level LSTM: trains on generated text and samples a passage after every epoch."""

import argparse
import random
import time

import torch
import torch.nn as nn

parser = argparse.ArgumentParser(description="char-rnn")
parser.add_argument("--emsize", type=int, default=256, help="size of character embeddings")
parser.add_argument("--nhid", type=int, default=512, help="number of hidden units per layer")
parser.add_argument("--nlayers", type=int, default=2, help="number of layers")
parser.add_argument("--lr", type=float, default=0.002, help="initial learning rate")
parser.add_argument("--clip", type=float, default=0.25, help="gradient clipping")
parser.add_argument("--epochs", type=int, default=3, help="upper epoch limit")
parser.add_argument("--batch_size", type=int, default=32, metavar="N", help="batch size")
parser.add_argument("--bptt", type=int, default=128, help="sequence length")
parser.add_argument("--dropout", type=float, default=0.2)
parser.add_argument("--chars", type=int, default=100_000, help="length of the generated corpus")
parser.add_argument("--sample_length", type=int, default=300)
parser.add_argument("--temperature", type=float, default=0.8)
parser.add_argument("--log-interval", type=int, default=5, metavar="N", help="report interval")
parser.add_argument("--save", type=str, default="char_rnn.pt", help="path to save the final model")
parser.add_argument("--seed", type=int, default=1111)
args = parser.parse_args()

random.seed(args.seed)
torch.manual_seed(args.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

subjects, verbs = ["the cat", "a dog", "my neighbour", "the old ship"], ["sees", "follows", "forgets", "paints"]
text = ""
while len(text) < args.chars:
    text += f"{random.choice(subjects)} {random.choice(verbs)} {random.choice(subjects)}.\n"
vocab = sorted(set(text))
stoi = {c: i for i, c in enumerate(vocab)}
ids = torch.tensor([stoi[c] for c in text], dtype=torch.long)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous().to(device)


def repackage_hidden(h):
    """Cut hidden states from their history."""
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


class CharRNN(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers, dropout):
        super().__init__()
        self.nhid, self.nlayers = nhid, nlayers
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return self.decoder(self.drop(output)).view(-1, self.decoder.out_features), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return (weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid))


@torch.no_grad()
def sample(model, length, temperature):
    model.eval()
    hidden = model.init_hidden(1)
    token = torch.randint(len(vocab), (1, 1), dtype=torch.long).to(device)
    characters = []
    for _ in range(length):
        output, hidden = model(token, hidden)
        weights = output.squeeze().div(temperature).exp().cpu()
        index = torch.multinomial(weights, 1)[0]
        token.fill_(index)
        characters.append(vocab[index])
    model.train()
    return "".join(characters)


train_data = batchify(ids, args.batch_size)
model = CharRNN(len(vocab), args.emsize, args.nhid, args.nlayers, args.dropout).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

for epoch in range(1, args.epochs + 1):
    model.train()
    total_loss, start_time = 0.0, time.time()
    hidden = model.init_hidden(args.batch_size)
    for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
        seq_len = min(args.bptt, len(train_data) - 1 - i)
        data, targets = train_data[i : i + seq_len], train_data[i + 1 : i + 1 + seq_len].view(-1)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        total_loss += loss.item()
        if batch % args.log_interval == 0 and batch > 0:
            ms = (time.time() - start_time) * 1000 / args.log_interval
            print(f"| epoch {epoch:3d} | batch {batch:5d} | ms/batch {ms:5.2f} | loss {total_loss / args.log_interval:5.2f}")
            total_loss, start_time = 0.0, time.time()
    print(f"end of epoch {epoch} loss {loss.item():.4f}")
    print("-" * 40)
    print(sample(model, args.sample_length, args.temperature))
    print("-" * 40)
    with open(args.save, "wb") as f:
        torch.save(model, f)

with open(args.save, "rb") as f:
    model = torch.load(f, weights_only=False)
    model.rnn.flatten_parameters()
print(sample(model, args.sample_length // 4, args.temperature))
