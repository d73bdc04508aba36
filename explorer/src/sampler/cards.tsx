// The stages of a sampler as cards: switched on and off, set, and put in any order by mouse or keyboard.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { fill, useStrings } from "../i18n/strings";
import { SliderField } from "../ui/controls";
import type { StageName } from "./options";

export interface CardField {
  readonly name: string;
  readonly label: string;
  readonly value: number;
  readonly low: number;
  readonly high: number;
  readonly step: number;
  onMove(value: number): void;
}

export interface StageCard {
  readonly name: StageName;
  readonly title: string;
  readonly on: boolean;
  readonly fields: readonly CardField[];
  /** What it removed or changed. */
  readonly outcome: string;
  onSwitch(on: boolean): void;
}

interface CardsProps {
  readonly cards: readonly StageCard[];
  onOrder(names: readonly StageName[]): void;
}

export function StageCards({ cards, onOrder }: CardsProps): JSX.Element {
  const { chain: s } = useStrings();
  const [moved, setMoved] = useState("");
  const [dragged, setDragged] = useState<StageName>();
  const names = cards.map(({ name }) => name);
  const move = (name: StageName, to: number): void => {
    const index = Math.max(0, Math.min(names.length - 1, to));
    if (names[index] === name) return;
    const next = names.filter((one) => one !== name);
    next.splice(index, 0, name);
    onOrder(next);
    const title = cards.find((card) => card.name === name)?.title ?? name;
    setMoved(fill(s.moved, { name: title, n: index + 1, all: names.length }));
  };
  return (
    <>
      <ol class="cards" aria-label={s.cards}>
        {cards.map((card, at) => (
          <CardView
            key={card.name}
            card={card}
            first={at === 0}
            last={at === cards.length - 1}
            dragged={dragged === card.name}
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
    </>
  );
}

interface CardProps {
  readonly card: StageCard;
  readonly first: boolean;
  readonly last: boolean;
  readonly dragged: boolean;
  onMove(by: 1 | -1): void;
  onGrab(): void;
  onDrop(): void;
}

function CardView({ card, first, last, dragged, onMove, onGrab, onDrop }: CardProps): JSX.Element {
  const { chain: s } = useStrings();
  const { name, title, on, fields, outcome, onSwitch } = card;
  return (
    <li
      class={`card${on ? "" : " asleep"}${dragged ? " dragged" : ""}`}
      data-stage={name}
      draggable
      onDragStart={(event) => {
        // Moving a slider inside the card, or selecting its number, does not drag the card.
        if (document.activeElement?.matches("li.card input:active")) return event.preventDefault();
        event.dataTransfer?.setData("text/plain", name);
        onGrab();
      }}
      onDragOver={(event) => event.preventDefault()}
      onDrop={(event) => {
        event.preventDefault();
        onDrop();
      }}
    >
      <span class="grip" title={s.grip} aria-hidden="true">
        ⠿
      </span>
      <label class="switch" title={fill(s.use, { name: title })}>
        <input
          type="checkbox"
          role="switch"
          name={`use-${name}`}
          checked={on}
          onChange={(event) => onSwitch(event.currentTarget.checked)}
        />
        <span>{title}</span>
      </label>
      <div class="fields">
        {fields.map((field) => (
          <SliderField key={field.name} {...field} />
        ))}
      </div>
      <span class="places">
        <button type="button" disabled={first} aria-label={fill(s.up, { name: title })} onClick={() => onMove(-1)}>
          ↑
        </button>
        <button type="button" disabled={last} aria-label={fill(s.down, { name: title })} onClick={() => onMove(1)}>
          ↓
        </button>
      </span>
      <span class="outcome">{outcome}</span>
    </li>
  );
}
