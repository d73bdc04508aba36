// Hierarchical softmax: the tree and the product along a path.

import { hierarchy, tree as layout, type HierarchyPointNode } from "d3-hierarchy";
import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { sum } from "../math/linear";
import { huffman, leafProbability, paths, turnProbability, type Node, type Turn } from "../math/huffman";
import { Choice } from "../ui/controls";
import { fixed } from "../ui/format";
import { Formula, i, o, over, row, sub } from "../ui/formula";
import { Step } from "./learnStep";
import type { Learn } from "./useLearn";
import { COUNTS, FORKS } from "./toyModel";
import { FactRow, Heads } from "../ui/factsTable";

const ROOT = huffman(COUNTS);
const PATHS = paths(ROOT);
const [WIDTH, HEIGHT] = [420, 400];

type Point = HierarchyPointNode<Node>;

export function TreeStep({ learn }: { learn: Learn }): JSX.Element {
  const { tree: s, common, words } = useStrings();
  const p = words.map((_, v) => leafProbability(PATHS.get(v) ?? [], learn.hidden, FORKS));
  const path = PATHS.get(learn.leaf) ?? [];
  const factors = path.map((turn) => turnProbability(turn, learn.hidden, FORKS));
  const word = words[learn.leaf] ?? "";
  return (
    <Step
      id="tree"
      texts={s}
      learn={learn}
      formula={
        <Formula label="p of a word is the product over the forks on its path of sigma of plus or minus w dot h">
          {row(i("p"), o("("), i("w"), o(")"), o("="))}
          {over("∏", i("f"))}
          {row(i("σ"), o("("), o("±"), sub(i("w"), i("f")), o("·"), i("h"), o(")"))}
        </Formula>
      }
    >
      <div class="controls">
        <Choice
          name="leaf"
          label={s.word}
          value={String(learn.leaf)}
          options={words.map((text, v) => [String(v), text] as const)}
          onChoose={(v) => learn.setLeaf(Number(v))}
        />
      </div>
      <p class="headline" role="status" data-chart="product">
        {fill(s.product, { word })} {factors.map((x) => fixed(x, 4)).join(" × ")} ={" "}
        <strong>{fixed(p[learn.leaf] ?? NaN, 4)}</strong>
      </p>
      <Drawing path={path} learn={learn} words={words} p={p} label={`${s.title}: ${word}`} />
      <details>
        <summary>{common.numbers}</summary>
        <table class="facts" data-chart="leaves">
          <Heads of={[common.word, s.seen, s.depth, s.way, common.probability]} />
          <tbody>
            {words.map((text, v) => (
              <FactRow
                key={v}
                head={text}
                cells={[
                  COUNTS[v],
                  PATHS.get(v)?.length,
                  (PATHS.get(v) ?? []).map((turn) => (turn.sign > 0 ? s.left : s.right)).join(" "),
                  fixed(p[v] ?? NaN, 4),
                ]}
              />
            ))}
          </tbody>
        </table>
      </details>
      <p class="note">
        {s.all}
        {common.colon}
        {fixed(sum(p), 3)}
      </p>
    </Step>
  );
}

interface DrawingProps {
  readonly path: readonly Turn[];
  readonly learn: Learn;
  readonly words: readonly string[];
  readonly p: readonly number[];
  readonly label: string;
}

function Drawing({ path, learn, words, p, label }: DrawingProps): JSX.Element {
  const points: Point = layout<Node>().size([WIDTH - 40, HEIGHT - 90])(
    hierarchy<Node>(ROOT, (node) => ("fork" in node ? [node.left, node.right] : null)),
  );
  const forksOnPath = new Set(path.map((turn) => turn.fork));
  const onPath = (node: Node): boolean => ("fork" in node ? forksOnPath.has(node.fork) : node.leaf === learn.leaf);
  const x = (point: Point): number => point.x + 20;
  const y = (point: Point): number => point.y + 24;
  return (
    <svg class="tree" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={label}>
      {points.links().map(({ source, target }) => {
        const { data } = source;
        if (!("fork" in data)) return null;
        const sign = target.data === data.left ? 1 : -1;
        const chance = turnProbability({ fork: data.fork, sign }, learn.hidden, FORKS);
        const lit = onPath(source.data) && onPath(target.data);
        return (
          <g key={`${data.fork}${sign}`} class={lit ? "branch lit" : "branch"}>
            <line x1={x(source)} y1={y(source)} x2={x(target)} y2={y(target)} />
            <text
              x={(x(source) + x(target)) / 2 + (sign > 0 ? -8 : 8)}
              y={(y(source) + y(target)) / 2}
              text-anchor={sign > 0 ? "end" : "start"}
            >
              {fixed(chance, 2)}
            </text>
          </g>
        );
      })}
      {points.descendants().map((point) => {
        const { data } = point;
        const lit = onPath(data);
        if ("fork" in data)
          return <circle key={`f${data.fork}`} class={lit ? "fork lit" : "fork"} cx={x(point)} cy={y(point)} r={6} />;
        return (
          <g key={`w${data.leaf}`} class={lit ? "leaf lit" : "leaf"}>
            <circle cx={x(point)} cy={y(point)} r={4} />
            <text x={x(point)} y={y(point) + 22} text-anchor="middle">
              {words[data.leaf]}
            </text>
            <text class="p" x={x(point)} y={y(point) + 40} text-anchor="middle">
              {fixed(p[data.leaf] ?? NaN, 3)}
            </text>
          </g>
        );
      })}
    </svg>
  );
}
