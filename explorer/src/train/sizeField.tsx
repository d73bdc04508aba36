// A size over many powers of two: a slider with eight stops per power of two, and a number field.

import type { JSX } from "preact";
import { useId } from "preact/hooks";
import { NumberInput, Range } from "../ui/controls";
import { grouped } from "../ui/format";

interface SizeProps {
  readonly name: string;
  readonly label: string;
  readonly value: number;
  readonly range: readonly [number, number];
  onSet(value: number, drag: boolean): void;
}

export function Size({ name, label, value, range: [low, high], onSet }: SizeProps): JSX.Element {
  const id = useId();
  const stops = { value: stopOf(value), low: stopOf(low), high: stopOf(high), shown: grouped(value) };
  const exact = { name: `${name}-exact`, aria: label, value, low, high };
  return (
    <div class="slider size">
      <label for={id}>{label}</label>
      <Range id={id} name={name} {...stops} onMove={(stop) => onSet(sizeOf(stop), true)} />
      <NumberInput {...exact} onSet={(next) => onSet(next, true)} />
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
