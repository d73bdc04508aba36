// Keep keyboard focus when its element disappears or becomes disabled.

import { useLayoutEffect } from "preact/hooks";

/**
 * Move focus to the first of `fallbacks` when the focused element inside the box is lost.
 *
 * `fallbacks` returns selectors within the box, best first; it is called before the change is drawn.
 */
export function useKeptFocus(
  box: { readonly current: HTMLElement | null },
  fallbacks: (held: Element) => readonly string[],
): void {
  const now = document.activeElement;
  const held = now && box.current?.contains(now) ? now : undefined;
  const after = held && fallbacks(held);
  useLayoutEffect(() => {
    if (!held || !after || (held.isConnected && !held.matches(":disabled"))) return;
    const found = after.map((one) => box.current?.querySelector<HTMLElement>(one)).find(Boolean);
    found?.focus();
  });
}
