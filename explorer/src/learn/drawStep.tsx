// Seeded draws beside the probabilities.

import type { JSX } from "preact";
import { useStrings } from "../i18n/strings";
import { Bars } from "../ui/bars";
import { Choice, NumberField } from "../ui/controls";
import { fixed, grouped } from "../ui/format";
import { Formula, gap, i, log, n, o, over, row, sub } from "../ui/formula";
import { Step } from "./learnStep";
import { drawnTokens, SHOWN } from "./learnPython";
import { DRAW_COUNTS, SEEDS, type Learn } from "./useLearn";

export function Draw({ learn }: { learn: Learn }): JSX.Element {
  const { draw: s, common, words } = useStrings();
  const tokens = drawnTokens(learn);
  const count = tokens.length;
  const times = words.map((_, v) => tokens.filter((token) => token === v).length);
  const p = learn.left.probability;
  return (
    <Step
      id="draw"
      texts={s}
      learn={learn}
      formula={
        <>
          <Formula label="the word is the argmax over i of z plus g">
            {row(
              i("w"),
              o("="),
              over("argmax", i("i")),
              o("("),
              sub(i("z"), i("i")),
              o("+"),
              sub(i("g"), i("i")),
              o(")"),
            )}
          </Formula>
          <Formula label="g is minus log of minus log of u, where u is a number between 0 and 1">
            {row(sub(i("g"), i("i")), o("="), o("−"), log([o("("), o("−"), log(sub(i("u"), i("i"))), o(")")]), gap())}
            {row(n(0), o("<"), sub(i("u"), i("i")), o("<"), n(1))}
          </Formula>
        </>
      }
    >
      <div class="controls pair">
        <NumberField
          name="seed"
          label={s.seed}
          value={learn.seed}
          low={0}
          high={SEEDS}
          onSet={(seed) => learn.setSeed(seed, true)}
        />
        <Choice
          name="draws"
          label={s.count}
          value={learn.draws}
          options={DRAW_COUNTS.map((times) => [times, grouped(Number(times))] as const)}
          onChoose={learn.setDraws}
        />
      </div>
      <p class="drawn" data-chart="greedy">
        <span class="note">{s.greedy}</span> <span class="chip">{words[learn.row.ids[0] ?? 0]}</span>
      </p>
      <p class="drawn" data-chart="drawn">
        <span class="note">{s.first}</span>{" "}
        {tokens.slice(0, SHOWN).map((token, at) => (
          <span key={at} class="chip">
            {words[token]}
          </span>
        ))}
      </p>
      <Bars
        name="shares"
        caption={`${s.seen}   ┃ ${s.expected}`}
        heads={[common.word, s.times, s.seen, s.expected]}
        domain={[0, 1]}
        rows={times.map((drawn, v) => {
          const expected = p[v] ?? 0;
          const spread = 1.96 * Math.sqrt((expected * (1 - expected)) / count);
          return {
            head: words[v] ?? "",
            cells: [grouped(drawn), fixed(drawn / count, 3), fixed(expected, 3)],
            value: drawn / count,
            dead: expected === 0,
            ...(expected > 0
              ? { mark: expected, band: [Math.max(0, expected - spread), Math.min(1, expected + spread)] as const }
              : {}),
          };
        })}
        footHead={common.sum}
        foot={[grouped(count), fixed(1, 3), fixed(1, 3)]}
      />
      <p class="note">{s.band}</p>
    </Step>
  );
}
