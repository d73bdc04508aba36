// Numbers as they are read: a real minus sign, a fixed number of digits, names for what is no number.

export function fixed(x: number, digits = 2): string {
  if (Number.isNaN(x)) return "nan";
  if (!Number.isFinite(x)) return x > 0 ? "inf" : "−inf";
  const text = Math.abs(x).toFixed(digits);
  return x < 0 && Number(text) !== 0 ? `−${text}` : text;
}

/** With a sign in front, whatever it is. */
export function signed(x: number, digits = 2): string {
  const text = fixed(x, digits);
  return text.startsWith("−") || !Number.isFinite(x) ? text : `+${text}`;
}

/** Small and large numbers in few characters: 1.2e+38. */
export function short(x: number): string {
  if (!Number.isFinite(x) || (Math.abs(x) < 1e5 && (Math.abs(x) >= 1e-3 || x === 0))) return fixed(x, 3);
  return x.toExponential(2).replace("-", "−");
}

export function whole(x: number): string {
  return x.toLocaleString("en-US");
}

export function percent(x: number): string {
  const text = (100 * x).toFixed(x < 0.0995 ? 1 : 0);
  return `${text}%`;
}

// The same numbers as Python writes them.

export function py(x: number): string {
  const text = String(x);
  return Number.isInteger(x) && !text.includes("e") ? `${text}.0` : text;
}

export function pyList(x: readonly number[]): string {
  return `[${x.map(py).join(", ")}]`;
}
