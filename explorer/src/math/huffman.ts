// Hierarchical softmax: a leaf is a path of left-or-right decisions, chapter 11.

import { dot, sigmoid, type Matrix, type Vector } from "./linear";

export type Node = { readonly leaf: number } | { readonly fork: number; readonly left: Node; readonly right: Node };

/** One decision on the path to a leaf: +1 is left, -1 right. */
export interface Turn {
  readonly fork: number;
  readonly sign: 1 | -1;
}

/** Join the two rarest subtrees until one is left; V - 1 forks, the last one is the root. */
export function huffman(counts: Vector): Node {
  const heap: { count: number; tie: number; node: Node }[] = counts.map((count, leaf) => ({
    count,
    tie: leaf,
    node: { leaf },
  }));
  for (let fork = 0; fork < counts.length - 1; fork++) {
    heap.sort((a, b) => a.count - b.count || a.tie - b.tie);
    const [left, right] = heap.splice(0, 2);
    if (!left || !right) throw new Error("a tree needs two subtrees to join");
    heap.push({
      count: left.count + right.count,
      tie: counts.length + fork,
      node: { fork, left: left.node, right: right.node },
    });
  }
  const root = heap[0];
  if (!root) throw new Error("a tree needs at least one leaf");
  return root.node;
}

/** Each leaf's path from the root. */
export function paths(root: Node): Map<number, Turn[]> {
  const found = new Map<number, Turn[]>();
  const walk = (node: Node, path: Turn[]): void => {
    if ("leaf" in node) {
      found.set(node.leaf, path);
      return;
    }
    walk(node.left, [...path, { fork: node.fork, sign: 1 }]);
    walk(node.right, [...path, { fork: node.fork, sign: -1 }]);
  };
  walk(root, []);
  return found;
}

/** The probability of one decision: σ(± w · h). */
export function turnProbability(turn: Turn, h: Vector, weight: Matrix): number {
  return sigmoid(turn.sign * dot(weight[turn.fork] ?? [], h));
}

/** The product along the path. */
export function leafProbability(path: readonly Turn[], h: Vector, weight: Matrix): number {
  return path.reduce((p, turn) => p * turnProbability(turn, h, weight), 1);
}
