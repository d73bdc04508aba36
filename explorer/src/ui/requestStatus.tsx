// The status of a request: loading with a stop button, or an error with a retry button. Error texts are
// in the page's language, from the server's code and numbers.

import type { JSX } from "preact";
import type { Progress, ServerError } from "../api";
import type { RequestState } from "../useRequest";
import { fill, useStrings, type Strings } from "../i18n/strings";
import { grouped } from "./format";
import { Inline } from "./prose";

interface StatusProps {
  readonly request: RequestState<unknown>;
  /** The text while loading. */
  readonly waiting: string;
}

export function Status({ request, waiting }: StatusProps): JSX.Element {
  const { errors: s } = useStrings();
  const { error: failed } = request;
  return (
    <div class="status">
      <p class={failed ? "note alarm" : "note"} role="status" aria-busy={request.loading}>
        {failed ? <Inline text={errorText(failed, s, request.progress)} /> : request.loading ? waiting : ""}
      </p>
      {request.loading && request.progress ? <ProgressBar request={request} /> : null}
      {request.loading ? (
        <button type="button" class="quiet" data-do="stop" onClick={request.stop}>
          {s.stop}
        </button>
      ) : failed ? (
        <button type="button" class="quiet" data-do="again" onClick={request.retry}>
          {s.again}
        </button>
      ) : null}
    </div>
  );
}

/** How much has arrived, and how long the rest will take. */
function ProgressBar({ request }: { readonly request: RequestState<unknown> }): JSX.Element {
  const { errors: s } = useStrings();
  const { done = 0, all = 1 } = request.progress ?? {};
  const text = fill(s.progress, { done: grouped(done), all: grouped(all) });
  const seconds = request.secondsLeft;
  return (
    <span class="note progress" data-chart="progress" data-done={done} data-all={all}>
      <progress value={done} max={all} aria-label={text} /> {text}
      {seconds === undefined ? "" : ` · ${fill(s.left, { seconds: grouped(Math.max(1, Math.round(seconds))) })}`}
    </span>
  );
}

/** An error in the page's language, and how much had arrived before it. */
export function errorText({ code, message, facts }: ServerError, s: Strings["errors"], progress?: Progress): string {
  const kept = progress?.done ? ` ${fill(s.kept, { done: grouped(progress.done), all: grouped(progress.all) })}` : "";
  const messages: Record<string, string> = s.codes;
  const numbers = Object.fromEntries(
    Object.entries(facts).flatMap(([name, value]) => (typeof value === "number" ? [[name, grouped(value)]] : [])),
  );
  return fill(messages[code] ?? s.other, { message, ...numbers }) + kept;
}
