// Format numbers: a minus sign, fixed digits, "nan" and "inf".

export function fixed(x: number, digits = 2): string {
  if (Number.isNaN(x)) return "nan";
  if (!Number.isFinite(x)) return x > 0 ? "inf" : "−inf";
  const text = Math.abs(x).toFixed(digits);
  return x < 0 && Number(text) !== 0 ? `−${text}` : text;
}

/** With a plus or minus sign. */
export function signed(x: number, digits = 2): string {
  const text = fixed(x, digits);
  return text.startsWith("−") || !Number.isFinite(x) ? text : `+${text}`;
}

/** Short: three decimals, or an exponent for small and large numbers. */
export function short(x: number): string {
  if (!Number.isFinite(x) || (Math.abs(x) < 1e5 && (Math.abs(x) >= 1e-3 || x === 0))) return fixed(x, 3);
  return x.toExponential(2).replace("-", "−");
}

const GROUPED = new Intl.NumberFormat("en-US");

export function grouped(x: number): string {
  return GROUPED.format(x);
}

/** 2.0 M, 135 M, 8.0 B. */
export function compact(x: number): string {
  const [unit, name] = (
    [
      [1e9, "B"],
      [1e6, "M"],
      [1e3, "K"],
    ] as const
  ).find(([size]) => x >= size) ?? [1, ""];
  const value = x / unit;
  return `${value >= 99.5 || unit === 1 ? Math.round(value) : value.toFixed(1)}${name && ` ${name}`}`;
}

export function percent(x: number): string {
  const text = (100 * x).toFixed(x < 0.0995 ? 1 : 0);
  return `${text}%`;
}

// Numbers as Python literals.

export function py(x: number): string {
  const text = String(x);
  return Number.isInteger(x) && !text.includes("e") ? `${text}.0` : text;
}

export function pyList(x: readonly number[]): string {
  return `[${x.map(py).join(", ")}]`;
}
