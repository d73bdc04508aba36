// One stage as a card: on or off, its number, and its place, by mouse or by keyboard.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n";
import { fixed } from "../ui/format";
import { Slider } from "../ui/controls";
import { RANGES, type Card } from "./state";

interface CardProps {
  readonly card: Card;
  readonly first: boolean;
  readonly last: boolean;
  readonly dragged: boolean;
  readonly outcome: string;
  onEdit(card: Card, drag: boolean): void;
  onMove(by: 1 | -1): void;
  onGrab(): void;
  onDrop(): void;
}

export function CardView(props: CardProps): JSX.Element {
  const { card, first, last, dragged, outcome, onEdit, onMove, onGrab, onDrop } = props;
  const { chain: s } = useStrings();
  const name = s.names[card.name];
  const [low, high, step] = RANGES[card.name];
  return (
    <li
      class={`card${card.on ? "" : " asleep"}${dragged ? " dragged" : ""}`}
      data-stage={card.name}
      draggable
      onDragStart={(event) => {
        // A slider inside a card is dragged for its own sake.
        if (document.activeElement instanceof HTMLInputElement && document.activeElement.matches("li.card input[type=range]:active")) {
          event.preventDefault();
          return;
        }
        event.dataTransfer?.setData("text/plain", card.name);
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
      <label class="switch" title={fill(s.use, { name })}>
        <input
          type="checkbox"
          role="switch"
          name={`use-${card.name}`}
          checked={card.on}
          onChange={(event) => onEdit({ ...card, on: event.currentTarget.checked }, false)}
        />
        <span>{name}</span>
      </label>
      <Slider
        name={card.name}
        label=""
        aria={name}
        value={card.value}
        low={low}
        high={high}
        step={step}
        shown={step === 1 ? String(card.value) : fixed(card.value, 2)}
        onMove={(value) => onEdit({ ...card, value }, true)}
      />
      <span class="outcome">{outcome}</span>
      <span class="places">
        <button type="button" disabled={first} aria-label={fill(s.up, { name })} onClick={() => onMove(-1)}>
          ↑
        </button>
        <button type="button" disabled={last} aria-label={fill(s.down, { name })} onClick={() => onMove(1)}>
          ↓
        </button>
      </span>
    </li>
  );
}
