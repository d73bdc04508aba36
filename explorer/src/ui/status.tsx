// How it stands with a question: it is being answered and can be stopped, or it failed and can be
// asked again. What went wrong is said in the page's language, from the server's code and numbers.

import type { JSX } from "preact";
import { Refused } from "../ask";
import type { Asked } from "../asked";
import { fill, useStrings, type Strings } from "../i18n";
import { whole } from "./format";

interface StatusProps {
  readonly asked: Asked<unknown>;
  /** What is said meanwhile. */
  readonly waiting: string;
}

export function Status({ asked, waiting }: StatusProps): JSX.Element {
  const { errors: s } = useStrings();
  const { failed } = asked;
  return (
    <div class="status">
      <p class={failed ? "note alarm" : "note"} role="status" aria-busy={asked.waiting}>
        {failed ? spoken(failed, s) : asked.waiting ? waiting : ""}
      </p>
      {asked.waiting ? (
        <button type="button" class="quiet" data-do="stop" onClick={asked.stop}>
          {s.stop}
        </button>
      ) : failed ? (
        <button type="button" class="quiet" data-do="again" onClick={asked.again}>
          {s.again}
        </button>
      ) : null}
    </div>
  );
}

/** What went wrong, in words. */
export function spoken({ code, message, facts }: Refused, s: Strings["errors"]): string {
  const said: Record<string, string> = s.codes;
  const numbers = Object.fromEntries(Object.entries(facts).map(([name, value]) => [name, whole(value)]));
  return fill(said[code] ?? s.other, { message, ...numbers });
}
