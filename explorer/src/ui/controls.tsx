// What the reader can move: sliders, switches, choices, numbers. All are native form controls.

import type { JSX } from "preact";
import { useId } from "preact/hooks";

interface SliderProps {
  readonly label: string;
  readonly value: number;
  readonly low: number;
  readonly high: number;
  readonly step: number;
  readonly name: string;
  readonly shown?: string;
  /** A name for readers of the screen, where no label is shown. */
  readonly aria?: string;
  onMove(value: number): void;
}

export function Slider({ label, value, low, high, step, name, shown, aria, onMove }: SliderProps): JSX.Element {
  const id = useId();
  return (
    <div class="slider">
      {label ? <label for={id}>{label}</label> : null}
      <input
        id={id}
        name={name}
        aria-label={aria}
        type="range"
        min={low}
        max={high}
        step={step}
        value={value}
        aria-valuetext={shown ?? String(value)}
        onInput={(event) => onMove(event.currentTarget.valueAsNumber)}
      />
      <output for={id}>{shown ?? value}</output>
    </div>
  );
}

interface SwitchProps {
  readonly label: string;
  readonly on: boolean;
  readonly name: string;
  onFlip(on: boolean): void;
}

export function Switch({ label, on, name, onFlip }: SwitchProps): JSX.Element {
  return (
    <label class="switch">
      <input
        type="checkbox"
        role="switch"
        name={name}
        checked={on}
        onChange={(event) => onFlip(event.currentTarget.checked)}
      />
      <span>{label}</span>
    </label>
  );
}

interface ChoiceProps<T extends string> {
  readonly label: string;
  readonly value: T;
  readonly name: string;
  readonly options: readonly (readonly [T, string])[];
  onChoose(value: T): void;
}

export function Choice<T extends string>(props: ChoiceProps<T>): JSX.Element {
  const { label, value, name, options, onChoose } = props;
  const group = useId();
  return (
    <fieldset class="choice">
      <legend>{label}</legend>
      <div class="segments">
        {options.map(([option, text]) => (
          <label key={option}>
            <input
              type="radio"
              name={`${name}-${group}`}
              value={option}
              checked={option === value}
              onChange={() => onChoose(option)}
            />
            <span>{text}</span>
          </label>
        ))}
      </div>
    </fieldset>
  );
}

interface NumberProps {
  readonly label: string;
  readonly value: number;
  readonly low: number;
  readonly high: number;
  readonly name: string;
  onSet(value: number): void;
}

export function WholeNumber({ label, value, low, high, name, onSet }: NumberProps): JSX.Element {
  const id = useId();
  return (
    <div class="number">
      <label for={id}>{label}</label>
      <input
        id={id}
        name={name}
        type="number"
        min={low}
        max={high}
        step={1}
        value={value}
        onInput={(event) => {
          const next = event.currentTarget.valueAsNumber;
          if (Number.isInteger(next) && next >= low && next <= high) onSet(next);
        }}
      />
    </div>
  );
}
