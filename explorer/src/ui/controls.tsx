// What the reader can move: sliders, switches, choices, numbers. All are native form controls.

import type { JSX } from "preact";
import { useId, useState } from "preact/hooks";
import { fill, useStrings } from "../i18n";
import { whole } from "./format";

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

interface WholeProps {
  readonly value: number;
  readonly low: number;
  readonly high: number;
  readonly name: string;
  readonly id?: string;
  /** A name for readers of the screen, where no label is its own. */
  readonly aria?: string;
  onSet(value: number): void;
}

/** A field that says so when it holds no number of the range; left, it shows the one in force. */
export function WholeInput({ value, low, high, name, id, aria, onSet }: WholeProps): JSX.Element {
  const { common } = useStrings();
  const [wrong, setWrong] = useState<string>();
  const why = useId();
  const bad = wrong !== undefined;
  return (
    <>
      <input
        id={id}
        name={name}
        aria-label={aria}
        aria-invalid={bad}
        aria-describedby={bad ? why : undefined}
        type="number"
        min={low}
        max={high}
        step={1}
        value={wrong ?? String(value)} // as text: a field that says the same is left alone, caret and all
        onInput={({ currentTarget: { value: typed, valueAsNumber: next } }) => {
          const fits = Number.isInteger(next) && next >= low && next <= high;
          setWrong(fits ? undefined : typed);
          if (fits) onSet(next);
        }}
        onBlur={(event) => {
          setWrong(undefined);
          event.currentTarget.value = String(value); // also in place of what is no number at all
        }}
      />
      {bad ? (
        <p id={why} class="note alarm wrong" role="alert">
          {fill(common.range, { low: whole(low), high: whole(high) })}
        </p>
      ) : null}
    </>
  );
}

export function WholeNumber({ label, ...field }: WholeProps & { readonly label: string }): JSX.Element {
  const id = useId();
  return (
    <div class="number">
      <label for={id}>{label}</label>
      <WholeInput {...field} id={id} />
    </div>
  );
}
