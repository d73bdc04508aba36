// A tooltip with the values of the cell under the pointer or with keyboard focus.
//
// It observes a container whose cells have `data-at` and keeps its own state, so that moving the
// pointer redraws the tooltip only.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

interface TipProps {
  readonly within: { readonly current: HTMLElement | null };
  readonly id: string;
  /** The content for the cell of a `data-at`; null for none. */
  content(at: string): ComponentChildren;
}

const GAP = 8;

export function Tooltip({ within, id, content }: TipProps): JSX.Element | null {
  const [over, setOver] = useState<HTMLElement>();
  const [, draw] = useState(0);
  const card = useRef<HTMLDivElement>(null);
  const at = over?.isConnected ? over.dataset["at"] : undefined;

  useEffect(() => {
    const box = within.current;
    if (!box) return;
    const show = (event: Event): void => {
      const cell = (event.target as Element).closest<HTMLElement>("[data-at]");
      setOver(cell ?? undefined);
    };
    const hide = (): void => setOver(undefined);
    const follow = (): void => draw((n) => n + 1); // the cell has moved
    const key = (event: KeyboardEvent): void => void (event.key === "Escape" && hide());
    const pairs: [string, EventListener][] = [
      ["pointerover", show],
      ["focusin", show],
      ["pointerleave", hide],
      ["focusout", hide],
      ["scroll", follow],
      ["keydown", key as EventListener],
    ];
    pairs.forEach(([name, listen]) => box.addEventListener(name, listen));
    addEventListener("scroll", follow, { passive: true });
    return () => {
      pairs.forEach(([name, listen]) => box.removeEventListener(name, listen));
      removeEventListener("scroll", follow);
    };
  }, [within.current]);

  useLayoutEffect(() => {
    if (!over || !card.current) return;
    const [cell, own] = [over.getBoundingClientRect(), card.current.getBoundingClientRect()];
    const below = cell.bottom + GAP + own.height <= innerHeight;
    const left = Math.min(cell.left, document.documentElement.clientWidth - own.width - GAP);
    card.current.style.left = `${Math.max(GAP, left)}px`;
    card.current.style.top = `${below ? cell.bottom + GAP : Math.max(GAP, cell.top - GAP - own.height)}px`;
  });

  const shown = at === undefined ? null : content(at);
  return shown === null ? null : (
    <div class="tip" role="tooltip" id={id} ref={card} data-tip={at}>
      {shown}
    </div>
  );
}
