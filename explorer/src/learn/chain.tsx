// Step 6: the sampler's stages as cards that can be put in another order.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { fill, useStrings } from "../i18n";
import { kept, run, type StageName, type Trace } from "../math/filters";
import { sum } from "../math/linear";
import { softmax } from "../math/softmax";
import { Bars } from "../ui/bars";
import { fixed, percent } from "../ui/format";
import { Formula, i, o, row, sub, sup } from "../ui/math";
import { Python } from "../ui/prose";
import { Step } from "../ui/step";
import { CardView } from "./card";
import { samplerCode } from "./python";
import { active, EXAMPLE, inOrder, ORDERS, orderOf, type Card, type Learn, type Order } from "./state";

export function Chain({ learn }: { learn: Learn }): JSX.Element {
  const { chain: s, common, words } = useStrings();
  const [moved, setMoved] = useState("");
  const [dragged, setDragged] = useState<StageName>();
  const { cards, logits } = learn;
  const { trace } = learn.left;
  const p = softmax(learn.left.logits);
  const raw = softmax(logits);
  const leaves = (order: Order): number[] => kept(run(active(inOrder(cards, order)), logits).logits);
  const counts = (order: Order): number => kept(run(active(inOrder(EXAMPLE, order)), logits).logits).length;
  const cutBy = new Map(trace.flatMap((step) => step.cut.map((id) => [id, step.stage.name] as const)));

  const move = (name: StageName, to: number): void => {
    const at = cards.findIndex((card) => card.name === name);
    const place = Math.max(0, Math.min(cards.length - 1, to));
    if (at < 0 || at === place) return;
    const next = cards.filter((card) => card.name !== name);
    const card = cards[at];
    if (card) next.splice(place, 0, card);
    learn.setCards(next);
    setMoved(fill(s.moved, { name: s.names[name], n: place + 1, all: cards.length }));
  };
  const edit = (card: Card, drag: boolean): void =>
    learn.setCards(cards.map((old) => (old.name === card.name ? card : old)), drag);

  return (
    <Step
      id="chain"
      number={6}
      title={s.title}
      text={s.text}
      tryThis={fill(s.try, { hf: counts("hf"), llama: counts("llama.cpp") })}
      formula={
        <Formula label="a word that is cut gets the logit minus infinity, so its probability is 0">
          {row(sub(i("z"), i("i")), o("="), o("−"), i("∞"), o("⇒"), sub(i("p"), i("i")), o("∝"))}
          {row(sup(i("e"), [o("−"), i("∞")]), o("="), i("0"))}
        </Formula>
      }
      python={<Python code={samplerCode(learn)} values={[kept(learn.left.logits).sort((a, b) => a - b)]} />}
    >
      <div class="controls buttons">
        {(["hf", "llama.cpp"] as const).map((order) => (
          <button
            key={order}
            type="button"
            aria-pressed={orderOf(cards) === order}
            data-order={order}
            onClick={() => learn.setCards(inOrder(cards, order))}
          >
            {order === "hf" ? s.hf : s.llama}
          </button>
        ))}
        <button type="button" class="quiet" data-order="example" onClick={() => learn.setCards(EXAMPLE)}>
          {s.example}
        </button>
      </div>
      <ol class="cards" aria-label={s.cards}>
        {cards.map((card, at) => (
          <CardView
            key={card.name}
            card={card}
            first={at === 0}
            last={at === cards.length - 1}
            dragged={dragged === card.name}
            outcome={outcome(card, trace, raw, s)}
            onEdit={edit}
            onMove={(by) => move(card.name, at + by)}
            onGrab={() => setDragged(card.name)}
            onDrop={() => {
              if (dragged) move(dragged, at);
              setDragged(undefined);
            }}
          />
        ))}
      </ol>
      <p class="unseen" role="status">
        {moved}
      </p>
      <Bars
        name="left"
        caption={s.result}
        heads={[common.word, common.probability]}
        domain={[0, 1]}
        rows={p.map((value, v) => {
          const by = cutBy.get(v);
          return {
            head: words[v] ?? "",
            cells: [fixed(value, 3)],
            value,
            dead: by !== undefined,
            ...(by === undefined ? {} : { note: fill(s.by, { name: s.names[by] }) }),
          };
        })}
      />
      <dl class="orders" data-chart="orders">
        {(Object.keys(ORDERS) as Order[]).map((order) => (
          <div key={order}>
            <dt>{order === "hf" ? s.in_hf : s.in_llama}</dt>
            <dd>{leaves(order).map((v) => words[v]).join(" · ")}</dd>
          </div>
        ))}
      </dl>
      <p class="note" role="status">
        {leaves("hf").join() === leaves("llama.cpp").join() ? s.same : s.differ}
      </p>
    </Step>
  );
}

function outcome(
  card: Card,
  trace: readonly Trace[],
  raw: readonly number[],
  s: { left: string; skipped: string },
): string {
  const step = trace.find(({ stage }) => stage.name === card.name);
  if (!step) return s.skipped;
  const left = kept(step.logits);
  return fill(s.left, { n: left.length, mass: percent(sum(left.map((v) => raw[v] ?? 0))) });
}
