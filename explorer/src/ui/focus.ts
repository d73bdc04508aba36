// Focus that a change would take away: its element is gone, or has become disabled.

import { useLayoutEffect } from "preact/hooks";

/**
 * Whoever moves by keyboard stays within a box: what lost the focus hands it to the first of its heirs.
 *
 * `heirs` gives selectors within the box, best first, and is asked before the change is drawn.
 */
export function useKeptFocus(box: { readonly current: HTMLElement | null }, heirs: (held: Element) => readonly string[]): void {
  const now = document.activeElement;
  const held = now && box.current?.contains(now) ? now : undefined;
  const after = held && heirs(held);
  useLayoutEffect(() => {
    if (!held || !after || (held.isConnected && !held.matches(":disabled"))) return;
    const found = after.map((one) => box.current?.querySelector<HTMLElement>(one)).find(Boolean);
    found?.focus();
  });
}
