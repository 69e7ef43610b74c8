#!/usr/bin/env python3
"""Draws what `sala bench --context` measured: tokens a second by context, as SVG on stdout.

    sala bench --context >a.csv
    python3 tools/plot.py a.csv b.csv >speed.svg

Each file is a curve, named after the file; prefill stands above, decoding below. Python's standard library only."""

import csv
import math
import os
import sys
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, GAP = 760, 300, 80, 24, 34, 46
COLOURS = ["#1f6fb4", "#d1602b", "#2f8f4e", "#8a4fb0", "#b08a1f", "#555555"]
PANELS = [("prefill_tokens_per_second", "prefill, tokens/s"), ("decode_tokens_per_second", "decode, tokens/s")]


def read(path):
    """The rows of one file: {column: [(context, value)]}. Ends the program with the line of what is wrong."""
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as f:
        rows = csv.DictReader(f)
        columns = [c for c, _ in PANELS if c in (rows.fieldnames or [])]
        if "context" not in (rows.fieldnames or []) or not columns:
            sys.exit(f"plot.py: {path}: line 1: no column context, or none of {', '.join(c for c, _ in PANELS)}")
        points = {c: [] for c in columns}
        for row in rows:
            try:
                context = float(row["context"])
                for c in columns:
                    value = float(row[c])
                    if not (1 <= context <= 2**40 and 0 <= value <= 1e12):
                        raise ValueError("a number is out of range")
                    points[c].append((context, value))
            except (TypeError, ValueError) as e:
                sys.exit(f"plot.py: {path}: line {rows.line_num}: {e}")
    if not all(points.values()):
        sys.exit(f"plot.py: {path}: no rows below the heading")
    return points


def step(most):
    """The distance of lines of the grid: 1, 2 or 5 times a power of ten, at most six of them."""
    ten = 10 ** math.floor(math.log10(most / 6)) if most > 0 else 1
    return next(ten * k for k in (1, 2, 5, 10) if ten * k * 6 >= most)


def size(n):
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if n >= unit:
            return f"{n / unit:g}{name}"
    return f"{n:g}"


def text(x, y, words, anchor="middle", extra=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(words)}</text>'


def panel(column, title, files, top):
    """One diagram, its upper edge at `top`: context in powers of two from left to right, a rate upwards from 0."""
    curves = [(k, f[column]) for k, (_, f) in enumerate(files) if column in f]
    contexts = [math.log2(c) for _, points in curves for c, _ in points]
    low, high = (math.floor(min(contexts)), math.ceil(max(contexts))) if contexts else (0, 1)
    high = max(high, low + 1)
    most = max([v for _, points in curves for _, v in points] + [1e-9])
    grid = step(most)
    ceiling = grid * math.ceil(most / grid)

    def x(c):
        return LEFT + (math.log2(c) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(v):
        return top + HEIGHT - v / ceiling * HEIGHT

    out = [text(LEFT, top - 10, title, "start", ' font-weight="bold"')]
    for k in range(round(ceiling / grid) + 1):
        out.append(f'<path d="M{LEFT} {y(k * grid):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        out.append(text(LEFT - 8, y(k * grid) + 4, f"{k * grid:,g}", "end"))
    for p in range(low, high + 1):
        out.append(f'<path d="M{x(2.0**p):.1f} {top}V{top + HEIGHT}" stroke="#eee"/>')
        out.append(text(x(2.0**p), top + HEIGHT + 16, size(2.0**p)))
    for k, points in curves:
        colour = COLOURS[k % len(COLOURS)]
        line = " ".join(f"{x(c):.1f},{y(v):.1f}" for c, v in points)
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{x(c):.1f}" cy="{y(v):.1f}" r="3" fill="{colour}"/>' for c, v in points]
    return out


def main(paths):
    if paths and paths[0] in ("-h", "--help"):
        return print(__doc__)
    if not paths:
        sys.exit(__doc__)
    files = [(os.path.splitext(os.path.basename(p))[0], read(p)) for p in paths]
    height = TOP + len(PANELS) * (HEIGHT + GAP) + 18 * len(files)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12" fill="#222">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for i, (column, title) in enumerate(PANELS):
        out += panel(column, title, files, TOP + i * (HEIGHT + GAP))
    for k, (name, _) in enumerate(files):
        at = TOP + len(PANELS) * (HEIGHT + GAP) + 18 * k
        out.append(f'<path d="M{LEFT} {at}h24" stroke="{COLOURS[k % len(COLOURS)]}" stroke-width="3"/>')
        out.append(text(LEFT + 32, at + 4, name, "start"))
    print("\n".join(out + ["</svg>"]))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, csv.Error) as e:
        sys.exit(f"plot.py: {e}")
