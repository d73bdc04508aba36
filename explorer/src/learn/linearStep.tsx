// The linear layer as dot products, and what tying saves.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { Bars } from "../ui/bars";
import { Choice, optionsOf } from "../ui/controls";
import { fixed, percent, grouped } from "../ui/format";
import { Formula, gap, i, o, over, sub, sup } from "../ui/formula";
import { Step } from "./learnStep";
import { MODELS, type Learn, type ModelName } from "./useLearn";
import { WEIGHT } from "./toyModel";
import { Heads } from "../ui/factsTable";

/** Vocabulary size, hidden size, and the parameters of all other layers. */
const SIZES: Record<ModelName, { name: string; vocab: number; width: number; body: number }> = {
  toy: { name: "", vocab: 6, width: 3, body: 0 },
  smollm2: { name: "SmolLM2-135M", vocab: 49_152, width: 576, body: 106_203_456 },
  gemma3: { name: "Gemma 3 270M", vocab: 262_144, width: 640, body: 100_326_016 },
  llama3: { name: "Llama 3 8B", vocab: 128_256, width: 4096, body: 6_979_588_096 },
};

export function Linear({ learn }: { learn: Learn }): JSX.Element {
  const strings = useStrings();
  const { linear: s, common, words } = strings;
  return (
    <Step
      id="linear"
      texts={s}
      learn={learn}
      formula={
        <Formula label="z of word v is the sum over d of W[v, d] times h[d]">
          {sub(i("z"), i("v"))}
          {o("=")}
          {over("∑", i("d"))}
          {sub(i("W"), [i("v"), i("d")])}
          {sub(i("h"), i("d"))}
          {gap()}
          {i("z")}
          {o("=")}
          {i("h")}
          {sup(i("W"), i("⊤"))}
        </Formula>
      }
    >
      <table class="dots" data-chart="dots">
        <Heads of={[common.word, s.row, s.products, common.logit]} />
        <tbody>
          {WEIGHT.map((row, v) => (
            <tr key={v}>
              <th scope="row">{words[v]}</th>
              <td>
                {row.map((w, d) => (
                  <span key={d} class="weight">
                    {fixed(w, 1)}
                  </span>
                ))}
              </td>
              <td class="sum">
                {row.map((w, d) => (
                  <span key={d} class="term">
                    <Term first={d === 0} x={w * (learn.hidden[d] ?? NaN)} />
                  </span>
                ))}
              </td>
              <td class="result">= {fixed(learn.logits[v] ?? NaN, 2)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <Tying learn={learn} />
    </Step>
  );
}

/** "3.00", then "+ 0.20", "− 0.10". */
function Term({ x, first }: { x: number; first: boolean }): JSX.Element {
  if (first) return <>{fixed(x, 2)}</>;
  return (
    <>
      <span class="plus">{fixed(x, 2).startsWith("−") ? "−" : "+"}</span>
      {fixed(Math.abs(x), 2)}
    </>
  );
}

function Tying({ learn }: { learn: Learn }): JSX.Element {
  const { linear: s } = useStrings();
  const { vocab, width, body } = SIZES[learn.model];
  const matrix = vocab * width;
  const tied = learn.tied === "tied";
  const total = body + matrix * (tied ? 1 : 2);
  const parts = [
    [s.body, body],
    [s.embedding, matrix],
    [tied ? `${s.head} (${s.shared})` : s.head, tied ? 0 : matrix],
  ] as const;
  return (
    <div class="panel">
      <div class="controls pair">
        <Choice
          name="tied"
          label={s.tying}
          value={learn.tied}
          options={optionsOf(s, "untied", "tied")}
          onChoose={learn.setTied}
        />
        <Choice
          name="model"
          label={s.model}
          value={learn.model}
          options={MODELS.map((key) => [key, SIZES[key].name || s.toy] as const)}
          onChoose={learn.setModel}
        />
      </div>
      <Bars
        name="tying"
        caption={`V = ${grouped(vocab)}, D = ${grouped(width)}`}
        heads={["", s.parameters]}
        domain={[0, body + 2 * matrix]}
        rows={parts.map(([head, value]) => ({ head, cells: [grouped(value)], value, dead: value === 0 && tied }))}
        footHead={s.total}
        foot={[grouped(total)]}
      />
      <p class="note">{fill(s.saves, { n: grouped(matrix), share: percent(matrix / (body + 2 * matrix)) })}</p>
    </div>
  );
}
