// Where the head sits in an encoder–decoder; with the translation model of a run, if one was given.

import type { JSX } from "preact";
import { useStrings } from "../i18n/strings";
import { linear } from "../math/linear";
import { FactRow, Heads } from "../ui/factsTable";
import { fixed } from "../ui/format";
import { Formula, i, o, row, sup } from "../ui/formula";
import { Step } from "./learnStep";
import { WEIGHT } from "./toyModel";
import { TrainedTranslator, useTranslationRun } from "./trainedTranslator";
import { decoderStates } from "./learnPython";
import type { Learn } from "./useLearn";

const [BOX, TALL] = [170, 38];

export function Translation({ learn }: { learn: Learn }): JSX.Element {
  const { translation: s, common, words } = useStrings();
  const run = useTranslationRun();
  // The head gives one row of logits for each position.
  const rows = decoderStates(learn).map((state) => linear(state, WEIGHT));
  return (
    <Step
      id="translation"
      texts={s}
      learn={learn}
      tryThis={run === undefined ? s.try : s.try_run}
      formula={
        <Formula label="the logits of every position of the decoder are H times W transposed">
          {row(i("Z"), o("="), i("H"), sup(i("W"), i("⊤")))}
        </Formula>
      }
    >
      <svg class="tree" viewBox="0 0 520 232" role="img" aria-label={s.title}>
        <Box x={10} y={186} text={s.source} />
        <Box x={10} y={128} text={s.encoder} />
        <Box x={330} y={186} text={s.sofar} />
        <Box x={330} y={128} text={s.decoder} />
        <Box x={330} y={70} text={`${s.head}${common.colon}Z = H Wᵀ`} marked />
        <Box x={330} y={12} text={s.next} />
        <Arrow from={[95, 186]} to={[95, 166]} />
        <Arrow from={[180, 147]} to={[330, 147]} />
        <Arrow from={[415, 186]} to={[415, 166]} />
        <Arrow from={[415, 128]} to={[415, 108]} />
        <Arrow from={[415, 70]} to={[415, 50]} />
        <text x={255} y={138} text-anchor="middle">
          softmax(q Kᵀ / √d)
        </text>
        <text x={425} y={64}>
          softmax
        </text>
      </svg>
      {run === undefined ? (
        <table class="facts" data-chart="positions">
          <caption>{s.positions}</caption>
          <Heads of={[common.word, ...rows.map((_, at) => `${common.logit}, t = ${at + 1}`)]} />
          <tbody>
            {words.map((word, v) => (
              <FactRow key={v} head={word} cells={rows.map((logits) => fixed(logits[v] ?? NaN))} />
            ))}
          </tbody>
        </table>
      ) : (
        <TrainedTranslator run={run} />
      )}
    </Step>
  );
}

function Box({ x, y, text, marked }: { x: number; y: number; text: string; marked?: boolean }): JSX.Element {
  return (
    <g class={marked ? "leaf lit" : "leaf"}>
      <rect x={x} y={y} width={BOX} height={TALL} rx={6} fill="none" stroke="currentColor" />
      <text x={x + BOX / 2} y={y + TALL / 2 + 5} text-anchor="middle">
        {text}
      </text>
    </g>
  );
}

type Point = readonly [number, number];

function Arrow({ from: [x1, y1], to: [x2, y2] }: { from: Point; to: Point }): JSX.Element {
  const [dx, dy] = [Math.sign(x2 - x1), Math.sign(y2 - y1)];
  const tip = [
    [x2, y2],
    [x2 - 7 * dx - 4 * dy, y2 - 7 * dy - 4 * dx],
    [x2 - 7 * dx + 4 * dy, y2 - 7 * dy + 4 * dx],
  ];
  return (
    <g>
      <line x1={x1} y1={y1} x2={x2} y2={y2} stroke="currentColor" />
      <polygon points={tip.map((point) => point.join()).join(" ")} fill="currentColor" />
    </g>
  );
}
