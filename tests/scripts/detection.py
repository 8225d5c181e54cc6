"""A small anchor-free (FCOS-like) object detector, trained on rectangles.

Target assignment and post-processing are written per image, with boolean masks, nonzero, topk and a plain NMS loop,
so the amount of work depends on the data.
"""

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

INF = 1e8


class Rectangles(Dataset):
    """Images with one to `max_objects` filled rectangles; the class is the colour channel."""

    def __init__(self, num_images, image_size, max_objects, num_classes):
        self.num_images, self.image_size = num_images, image_size
        self.max_objects, self.num_classes = max_objects, num_classes

    def __len__(self):
        return self.num_images

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        size = self.image_size
        image = 0.1 * torch.randn(3, size, size, generator=g)
        num_objects = int(torch.randint(1, self.max_objects + 1, (1,), generator=g))
        boxes, labels = [], []
        for _ in range(num_objects):
            w, h = torch.randint(size // 8, size // 2, (2,), generator=g).tolist()
            x = int(torch.randint(0, size - w, (1,), generator=g))
            y = int(torch.randint(0, size - h, (1,), generator=g))
            label = int(torch.randint(0, self.num_classes, (1,), generator=g))
            image[label % 3, y : y + h, x : x + w] = 1.0
            boxes.append([x, y, x + w, y + h])
            labels.append(label)
        return image, {"boxes": torch.tensor(boxes, dtype=torch.float32), "labels": torch.tensor(labels)}


def collate(batch):
    images, targets = zip(*batch)
    return torch.stack(images), list(targets)


def conv_block(in_channels, out_channels, stride):
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False),
        nn.GroupNorm(8, out_channels),
        nn.ReLU(inplace=True),
    )


class Detector(nn.Module):
    strides = (8, 16, 32)
    size_ranges = ((0, 32), (32, 64), (64, INF))

    def __init__(self, num_classes, width):
        super().__init__()
        self.num_classes = num_classes
        self.stem = nn.Sequential(conv_block(3, width, 2), conv_block(width, width, 2))
        self.stages = nn.ModuleList(
            [
                nn.Sequential(conv_block(width * m, width * n, 2), conv_block(width * n, width * n, 1))
                for m, n in ((1, 2), (2, 4), (4, 8))
            ]
        )
        self.lateral = nn.ModuleList([nn.Conv2d(width * n, width * 2, 1) for n in (2, 4, 8)])
        self.smooth = nn.ModuleList([nn.Conv2d(width * 2, width * 2, 3, padding=1) for _ in range(3)])
        self.cls_tower = nn.Sequential(*[conv_block(width * 2, width * 2, 1) for _ in range(2)])
        self.box_tower = nn.Sequential(*[conv_block(width * 2, width * 2, 1) for _ in range(2)])
        self.cls_logits = nn.Conv2d(width * 2, num_classes, 3, padding=1)
        self.bbox_pred = nn.Conv2d(width * 2, 4, 3, padding=1)
        self.centerness = nn.Conv2d(width * 2, 1, 3, padding=1)
        self.scales = nn.Parameter(torch.ones(3))
        nn.init.constant_(self.cls_logits.bias, -math.log((1 - 0.01) / 0.01))

    def forward(self, images):
        x = self.stem(images)
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        pyramid = [lateral(f) for lateral, f in zip(self.lateral, features)]
        for i in (1, 0):
            pyramid[i] = pyramid[i] + F.interpolate(pyramid[i + 1], size=pyramid[i].shape[-2:], mode="nearest")
        outputs, points = [], []
        for level, (smooth, feature, stride) in enumerate(zip(self.smooth, pyramid, self.strides)):
            feature = smooth(feature)
            cls_feature, box_feature = self.cls_tower(feature), self.box_tower(feature)
            level_out = torch.cat(
                [
                    self.cls_logits(cls_feature),
                    F.relu(self.bbox_pred(box_feature) * self.scales[level]) * stride,
                    self.centerness(box_feature),
                ],
                dim=1,
            )
            outputs.append(level_out.flatten(2).transpose(1, 2))
            h, w = feature.shape[-2:]
            ys, xs = torch.meshgrid(
                torch.arange(h, device=images.device), torch.arange(w, device=images.device), indexing="ij"
            )
            points.append(torch.stack([xs.flatten(), ys.flatten()], dim=1) * stride + stride // 2)
        return torch.cat(outputs, dim=1), points


def assign_targets(points, target, size_ranges):
    """For every location: the class of the smallest box that holds it (-1: background) and the four distances."""
    all_points = torch.cat(points).float()
    ranges = torch.cat([p.new_tensor(r).float().expand(len(p), 2) for p, r in zip(points, size_ranges)])
    boxes, labels = target["boxes"], target["labels"]
    left_top = all_points[:, None, :] - boxes[None, :, :2]
    right_bottom = boxes[None, :, 2:] - all_points[:, None, :]
    distances = torch.cat([left_top, right_bottom], dim=2)
    inside = distances.min(dim=2).values > 0
    largest = distances.max(dim=2).values
    in_range = (largest >= ranges[:, :1]) & (largest <= ranges[:, 1:])
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    areas = areas[None].repeat(len(all_points), 1)
    areas[~(inside & in_range)] = INF
    min_area, matched = areas.min(dim=1)
    assigned = labels[matched].clone()
    assigned[min_area == INF] = -1
    return assigned, distances[torch.arange(len(all_points), device=boxes.device), matched]


def sigmoid_focal_loss(logits, targets, alpha=0.25, gamma=2.0):
    p = torch.sigmoid(logits)
    ce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    return ((alpha * targets + (1 - alpha) * (1 - targets)) * ce * (1 - p_t) ** gamma).sum()


def iou_loss(pred, target):
    pred_area = (pred[:, 0] + pred[:, 2]) * (pred[:, 1] + pred[:, 3])
    target_area = (target[:, 0] + target[:, 2]) * (target[:, 1] + target[:, 3])
    w = torch.min(pred[:, 0], target[:, 0]) + torch.min(pred[:, 2], target[:, 2])
    h = torch.min(pred[:, 1], target[:, 1]) + torch.min(pred[:, 3], target[:, 3])
    inter = w * h
    return -torch.log((inter + 1.0) / (pred_area + target_area - inter + 1.0))


def detection_loss(model, outputs, points, targets):
    cls_loss = outputs.new_zeros(())
    box_loss = outputs.new_zeros(())
    ctr_loss = outputs.new_zeros(())
    num_positive = 0
    for output, target in zip(outputs, targets):
        labels, distances = assign_targets(points, target, model.size_ranges)
        positive = torch.nonzero(labels >= 0).squeeze(1)
        num_positive += positive.numel()
        one_hot = torch.zeros_like(output[:, : model.num_classes])
        one_hot[positive, labels[positive]] = 1.0
        cls_loss = cls_loss + sigmoid_focal_loss(output[:, : model.num_classes], one_hot)
        if positive.numel() == 0:
            continue
        wanted = distances[positive]
        horizontal, vertical = wanted[:, [0, 2]], wanted[:, [1, 3]]
        centerness = torch.sqrt(
            (horizontal.min(1).values / horizontal.max(1).values) * (vertical.min(1).values / vertical.max(1).values)
        )
        got = output[positive]
        box_loss = box_loss + (iou_loss(got[:, -5:-1], wanted) * centerness).sum()
        ctr_loss = ctr_loss + F.binary_cross_entropy_with_logits(got[:, -1], centerness, reduction="sum")
    norm = max(1, num_positive)
    return cls_loss / norm, box_loss / norm, ctr_loss / norm


def box_iou(a, b):
    lt = torch.max(a[:, None, :2], b[None, :, :2])
    rb = torch.min(a[:, None, 2:], b[None, :, 2:])
    inter = (rb - lt).clamp(min=0).prod(dim=2)
    area_a = (a[:, 2:] - a[:, :2]).prod(dim=1)
    area_b = (b[:, 2:] - b[:, :2]).prod(dim=1)
    return inter / (area_a[:, None] + area_b[None] - inter).clamp(min=1e-6)


def nms(boxes, scores, iou_threshold):
    order = scores.argsort(descending=True)
    keep = []
    while order.numel() > 0:
        best = order[0]
        keep.append(best.item())
        if order.numel() == 1:
            break
        ious = box_iou(boxes[best][None], boxes[order[1:]])[0]
        order = order[1:][ious <= iou_threshold]
    return torch.tensor(keep, dtype=torch.long, device=boxes.device)


@torch.no_grad()
def detect(model, images, score_threshold, topk, iou_threshold):
    model.eval()
    outputs, points = model(images)
    all_points = torch.cat(points).float()
    results = []
    for output in outputs:
        scores = output[:, : model.num_classes].sigmoid() * output[:, -1:].sigmoid()
        candidates = scores > score_threshold
        locations, classes = candidates.nonzero(as_tuple=True)
        scores = scores[candidates]
        if scores.numel() > topk:
            scores, top = scores.topk(topk)
            locations, classes = locations[top], classes[top]
        centre, distance = all_points[locations], output[locations, -5:-1]
        boxes = torch.cat([centre - distance[:, :2], centre + distance[:, 2:]], dim=1)
        keep_all = []
        for c in classes.unique():
            members = torch.where(classes == c)[0]
            keep_all.append(members[nms(boxes[members], scores[members], iou_threshold)])
        keep = torch.cat(keep_all) if keep_all else classes.new_zeros(0)
        results.append({"boxes": boxes[keep], "scores": scores[keep], "labels": classes[keep]})
    model.train()
    return results


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--num-classes", type=int, default=3)
    parser.add_argument("--max-objects", type=int, default=8)
    parser.add_argument("--num-images", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--score-threshold", type=float, default=0.005)
    parser.add_argument("--topk", type=int, default=100)
    parser.add_argument("--print-freq", type=int, default=4)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Detector(args.num_classes, args.width).to(device)
    dataset = Rectangles(args.num_images, args.image_size, args.max_objects, args.num_classes)
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, collate_fn=collate, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[args.epochs - 1], gamma=0.1)

    for epoch in range(args.epochs):
        for i, (images, targets) in enumerate(loader):
            images = images.to(device)
            targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
            outputs, points = model(images)
            losses = detection_loss(model, outputs, points, targets)
            loss = sum(losses)
            if not math.isfinite(loss.item()):
                raise SystemExit(f"Loss is {loss.item()}, stopping training")
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            if i % args.print_freq == 0:
                cls_loss, box_loss, ctr_loss = (part.item() for part in losses)
                print(
                    f"epoch {epoch} [{i}/{len(loader)}] loss {loss.item():.4f} "
                    f"cls {cls_loss:.4f} box {box_loss:.4f} ctr {ctr_loss:.4f}"
                )
        scheduler.step()
        images, targets = next(iter(loader))
        detections = detect(model, images.to(device), args.score_threshold, args.topk, iou_threshold=0.5)
        found = sum(len(d["boxes"]) for d in detections)
        hits = 0
        for detection, target in zip(detections, targets):
            if len(detection["boxes"]):
                ious = box_iou(target["boxes"].to(device), detection["boxes"])
                hits += int((ious.max(dim=1).values > 0.5).sum())
        total = sum(len(t["boxes"]) for t in targets)
        print(f"epoch {epoch}: {found} detections, recall@0.5 {hits / total:.3f}")


if __name__ == "__main__":
    main()
