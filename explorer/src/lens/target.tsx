// The target token: the next token of the text, or one token for all positions, found by text or id.
//
// The vocabulary is requested when the search field gets focus.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useVocabulary } from "../useRequest";
import { fill, useStrings } from "../i18n/strings";
import { TokenText, visible } from "../ui/tokenText";
import { Status } from "../ui/requestStatus";
import type { Token } from "./lensMeasures";
import { search } from "./searchTokens";

interface TargetProps {
  readonly model: string;
  /** The target for all positions; undefined for the next token of the text. */
  readonly token: Token | undefined;
  onTarget(id: number | null): void;
}

export function Target({ model, token, onTarget }: TargetProps): JSX.Element {
  const { lens: s } = useStrings();
  const [query, setQuery] = useState("");
  const [begun, setBegun] = useState(false);
  const request = useVocabulary(begun ? model : undefined);
  const texts = request.current ? request.data : undefined;
  const found = query && texts ? search(query, texts) : [];
  const setTarget = (id: number | null): void => {
    setQuery("");
    onTarget(id);
  };
  return (
    <div class="target" data-chart="target">
      <p>
        <span class="note">{s.target_of_column}</span>
        {token ? <TokenText text={token.text} /> : <strong>{s.follows}</strong>}
      </p>
      {token ? (
        <button type="button" data-do="follow" onClick={() => setTarget(null)}>
          {s.seekFollowing}
        </button>
      ) : null}
      <div class="number">
        <label for="target-token">{s.one_target}</label>
        <input
          id="target-token"
          name="target-token"
          type="search"
          value={query}
          onFocus={() => setBegun(true)}
          onInput={(event) => setQuery(event.currentTarget.value)}
        />
      </div>
      {request.error ? <Status request={request} waiting="" /> : null}
      {query && texts && !found.length ? <p class="note">{s.nothing}</p> : null}
      {found.length ? (
        <div class="controls buttons" data-chart="found">
          {found.map((id) => (
            <button
              key={id}
              type="button"
              class="found"
              data-id={id}
              aria-label={fill(s.set_target, { token: visible(texts?.[id] ?? "") })}
              onClick={() => setTarget(id)}
            >
              <TokenText text={texts?.[id] ?? ""} /> <small>{id}</small>
            </button>
          ))}
        </div>
      ) : null}
    </div>
  );
}
