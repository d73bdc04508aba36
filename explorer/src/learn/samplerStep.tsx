// The sampler's stages as cards that can be put in another order.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { StageCards } from "../sampler/cards";
import { Processed } from "../sampler/process";
import { Bars } from "../ui/bars";
import { fixed, percent } from "../ui/format";
import { Formula, i, o, row, sub, sup } from "../ui/formula";
import { Step } from "./learnStep";
import { EXAMPLE, inOrder, ORDERS, orderOf, RANGES, stagesOf, type Card, type Learn, type Order } from "./useLearn";

export function Chain({ learn }: { learn: Learn }): JSX.Element {
  const { chain: s, common, words } = useStrings();
  const { cards, left } = learn;
  const leaves = (of: readonly Card[], order: Order): number[] =>
    new Processed(learn.row, stagesOf(inOrder(of, order))).ids();
  const edit = (card: Card, drag: boolean): void =>
    learn.setCards(
      cards.map((old) => (old.name === card.name ? card : old)),
      drag,
    );
  const outcome = (name: string): string => {
    const step = left.steps.find(({ stage }) => stage === name);
    return step ? fill(s.left, { n: step.left, mass: percent(step.mass) }) : s.skipped;
  };

  return (
    <Step
      id="chain"
      texts={s}
      learn={learn}
      tryThis={fill(s.try, { hf: leaves(EXAMPLE, "hf").length, llama: leaves(EXAMPLE, "llama.cpp").length })}
      formula={
        <Formula label="a word that is removed gets the logit minus infinity, so its probability is 0">
          {row(sub(i("z"), i("i")), o("="), o("−"), i("∞"), o("⇒"), sub(i("p"), i("i")), o("∝"))}
          {row(sup(i("e"), [o("−"), i("∞")]), o("="), i("0"))}
        </Formula>
      }
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
      <StageCards
        cards={cards.map((card) => {
          const [low, high, step] = RANGES[card.name];
          return {
            name: card.name,
            title: s.names[card.name],
            on: card.on,
            outcome: outcome(card.name),
            fields: [
              {
                name: card.name,
                label: s.names[card.name],
                value: card.value,
                low,
                high,
                step,
                onMove: (value) => edit({ ...card, value }, true),
              },
            ],
            onSwitch: (on) => edit({ ...card, on }, false),
          };
        })}
        onOrder={(names) => learn.setCards(names.flatMap((name) => cards.filter((card) => card.name === name)))}
      />
      <Bars
        name="left"
        caption={s.result}
        heads={[common.word, common.probability]}
        domain={[0, 1]}
        rows={words.map((word, id) => {
          const by = left.removedAt(learn.row.rankOf(id))?.stage;
          const value = left.pOf(id);
          return {
            head: word,
            cells: [fixed(value, 3)],
            value,
            dead: by !== undefined,
            ...(by === undefined ? {} : { note: fill(s.by, { name: s.names[by as Card["name"]] }) }),
          };
        })}
      />
      <dl class="orders" data-chart="orders">
        {(Object.keys(ORDERS) as Order[]).map((order) => (
          <div key={order}>
            <dt>{order === "hf" ? s.in_hf : s.in_llama}</dt>
            <dd>
              {leaves(cards, order)
                .map((v) => words[v])
                .join(" · ")}
            </dd>
          </div>
        ))}
      </dl>
      <p class="note" role="status">
        {leaves(cards, "hf").join() === leaves(cards, "llama.cpp").join() ? s.same : s.differ}
      </p>
    </Step>
  );
}
