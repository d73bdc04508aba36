// A size over many powers of two: a slider with eight stops per power of two, and a number field.

import type { JSX } from "preact";
import { useId } from "preact/hooks";
import { NumberInput } from "../ui/controls";
import { grouped } from "../ui/format";

interface SizeProps {
  readonly name: string;
  readonly label: string;
  readonly value: number;
  readonly low: number;
  readonly high: number;
  onSet(value: number, drag: boolean): void;
}

export function Size({ name, label, value, low, high, onSet }: SizeProps): JSX.Element {
  const id = useId();
  return (
    <div class="slider size">
      <label for={id}>{label}</label>
      <input
        id={id}
        name={name}
        type="range"
        min={stopOf(low)}
        max={stopOf(high)}
        step={1}
        value={stopOf(value)}
        aria-valuetext={grouped(value)}
        onInput={(event) => onSet(sizeOf(event.currentTarget.valueAsNumber), true)}
      />
      <NumberInput
        name={`${name}-exact`}
        aria={label}
        value={value}
        low={low}
        high={high}
        onSet={(next) => onSet(next, true)}
      />
    </div>
  );
}

/** 8, 9, ... 15, 16, 18, ... 30, 32, 36, ...: stop 24 is 8, and every eighth is a power of two. */
export function sizeOf(stop: number): number {
  return 2 ** Math.floor(stop / 8) * (1 + (stop % 8) / 8);
}

/** The stop nearest to a size. */
export function stopOf(size: number): number {
  const power = Math.floor(Math.log2(size));
  return 8 * power + Math.round(8 * (size / 2 ** power - 1));
}
