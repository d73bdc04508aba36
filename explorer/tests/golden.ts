// The golden numbers, with what JSON lacks put back.
import { expect } from "vitest";
import stored from "./golden.json";

const NAMES: Record<string, number> = { inf: Infinity, "-inf": -Infinity, nan: NaN };

// eslint-disable-next-line @typescript-eslint/no-explicit-any -- as deep as the file is
export const golden: any = JSON.parse(JSON.stringify(stored), (_, value) =>
  typeof value === "string" && value in NAMES ? NAMES[value] : value,
);

/** Every number within the tolerance of its twin; infinities and NaN must be the same. */
export function expectClose(got: readonly number[], want: readonly number[], tolerance = 1e-12): void {
  expect(got.length).toBe(want.length);
  got.forEach((x, i) => {
    const y = want[i] ?? NaN;
    if (!Number.isFinite(x) || !Number.isFinite(y)) expect(x).toBe(y);
    else expect(Math.abs(x - y)).toBeLessThanOrEqual(tolerance * Math.max(1, Math.abs(y)));
  });
}
