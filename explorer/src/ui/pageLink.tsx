// Links between the pages.

import type { JSX } from "preact";
import { linkTo, navigate } from "../url";

interface LinkProps {
  readonly path: string;
  readonly current?: boolean;
  readonly class?: string;
  readonly children: string;
}

/** A link to a page, in the state that it was left in. */
export function PageLink({ path, current, class: style, children }: LinkProps): JSX.Element {
  const href = linkTo(path);
  return (
    <a
      href={href}
      class={style}
      aria-current={current ? "page" : undefined}
      onClick={(event) => {
        if (event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
        event.preventDefault();
        navigate(linkTo(path));
      }}
    >
      {children}
    </a>
  );
}
