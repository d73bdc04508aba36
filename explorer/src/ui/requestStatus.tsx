// The status of a request: loading with a stop button, or an error with a retry button. Error texts are
// in the page's language, from the server's code and numbers.

import type { JSX } from "preact";
import { ServerError } from "../api";
import type { RequestState } from "../useRequest";
import { fill, useStrings, type Strings } from "../i18n/strings";
import { grouped } from "./format";

interface StatusProps {
  readonly asked: RequestState<unknown>;
  /** The text while loading. */
  readonly waiting: string;
}

export function Status({ asked, waiting }: StatusProps): JSX.Element {
  const { errors: s } = useStrings();
  const { error: failed } = asked;
  return (
    <div class="status">
      <p class={failed ? "note alarm" : "note"} role="status" aria-busy={asked.loading}>
        {failed ? errorText(failed, s) : asked.loading ? waiting : ""}
      </p>
      {asked.loading ? (
        <button type="button" class="quiet" data-do="stop" onClick={asked.stop}>
          {s.stop}
        </button>
      ) : failed ? (
        <button type="button" class="quiet" data-do="again" onClick={asked.retry}>
          {s.again}
        </button>
      ) : null}
    </div>
  );
}

/** An error in the page's language. */
export function errorText({ code, message, facts }: ServerError, s: Strings["errors"]): string {
  const said: Record<string, string> = s.codes;
  const numbers = Object.fromEntries(
    Object.entries(facts).flatMap(([name, value]) => (typeof value === "number" ? [[name, grouped(value)]] : [])),
  );
  return fill(said[code] ?? s.other, { message, ...numbers });
}
