"""REINFORCE with a baseline on a cart-pole written in numpy."""

import argparse
import math
from collections import deque

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions import Categorical

parser = argparse.ArgumentParser(description="PyTorch REINFORCE example")
parser.add_argument("--gamma", type=float, default=0.99, metavar="G", help="discount factor (default: 0.99)")
parser.add_argument("--seed", type=int, default=543, metavar="N", help="random seed (default: 543)")
parser.add_argument("--hidden", type=int, default=128)
parser.add_argument("--episodes", type=int, default=50)
parser.add_argument("--max-steps", type=int, default=200)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--log-interval", type=int, default=5, metavar="N")
args = parser.parse_args()


class CartPole:
    """A pole on a cart: state (x, x', theta, theta'), two actions, one reward per step that it stands."""

    gravity, mass_cart, mass_pole, half_length, force, tau = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.state = np.zeros(4)

    def reset(self):
        self.state = self.rng.uniform(-0.05, 0.05, size=4)
        return self.state.astype(np.float32)

    def step(self, action):
        x, x_dot, theta, theta_dot = self.state
        force = self.force if action == 1 else -self.force
        total = self.mass_cart + self.mass_pole
        pole = self.mass_pole * self.half_length
        push = (force + pole * theta_dot**2 * math.sin(theta)) / total
        theta_acc = (self.gravity * math.sin(theta) - math.cos(theta) * push) / (
            self.half_length * (4.0 / 3.0 - self.mass_pole * math.cos(theta) ** 2 / total)
        )
        x_acc = push - pole * theta_acc * math.cos(theta) / total
        self.state = self.state + self.tau * np.array([x_dot, x_acc, theta_dot, theta_acc])
        done = bool(abs(self.state[0]) > 2.4 or abs(self.state[2]) > 12 * math.pi / 180)
        return self.state.astype(np.float32), 1.0, done


class Policy(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.affine1 = nn.Linear(4, hidden)
        self.dropout = nn.Dropout(p=0.2)
        self.action_head = nn.Linear(hidden, 2)
        self.value_head = nn.Linear(hidden, 1)
        self.saved = []
        self.rewards = []

    def forward(self, x):
        x = torch.relu(self.dropout(self.affine1(x)))
        return torch.softmax(self.action_head(x), dim=-1), self.value_head(x)


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(args.seed)
if torch.cuda.is_available():
    torch.cuda.manual_seed_all(args.seed)
env = CartPole(args.seed)
policy = Policy(args.hidden).to(device)
optimizer = optim.Adam(policy.parameters(), lr=args.lr)
eps = np.finfo(np.float32).eps.item()


def select_action(state):
    state = torch.from_numpy(state).float().unsqueeze(0).to(device)
    probs, value = policy(state)
    m = Categorical(probs)
    action = m.sample()
    policy.saved.append((m.log_prob(action), value))
    return action.item()


def finish_episode():
    R = 0.0
    returns = deque()
    for r in policy.rewards[::-1]:
        R = r + args.gamma * R
        returns.appendleft(R)
    returns = torch.tensor(returns, device=device)
    if len(returns) > 1:
        returns = (returns - returns.mean()) / (returns.std() + eps)
    policy_loss, value_loss = [], []
    for (log_prob, value), R in zip(policy.saved, returns):
        advantage = R - value.item()
        policy_loss.append(-log_prob * advantage)
        value_loss.append(nn.functional.smooth_l1_loss(value.view(1), R.view(1)))
    optimizer.zero_grad()
    loss = torch.cat(policy_loss).sum() + torch.stack(value_loss).sum()
    loss.backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.saved[:]
    return loss.item()


def main():
    running_reward = 10.0
    for i_episode in range(1, args.episodes + 1):
        state, ep_reward = env.reset(), 0.0
        for t in range(1, args.max_steps + 1):
            action = select_action(state)
            state, reward, done = env.step(action)
            policy.rewards.append(reward)
            ep_reward += reward
            if done:
                break
        running_reward = 0.05 * ep_reward + (1 - 0.05) * running_reward
        loss = finish_episode()
        if i_episode % args.log_interval == 0:
            print(
                f"Episode {i_episode}\tLoss: {loss:.3f}\tLast reward: {ep_reward:.2f}"
                f"\tAverage reward: {running_reward:.2f}"
            )
        if running_reward > 0.95 * args.max_steps:
            print(f"Solved! Running reward is now {running_reward} and the last episode runs to {t} time steps!")
            break


if __name__ == "__main__":
    main()
