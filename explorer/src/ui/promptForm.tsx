// The prompt field of all pages: what is typed is kept when another page is opened or the page is reloaded,
// and Ctrl+Enter submits it.

import type { ComponentChildren, JSX } from "preact";
import { useState } from "preact/hooks";
import { useStrings } from "../i18n/strings";
import type { TextField } from "../text/usePromptParam";

const STORED = "lmhead:draft";

interface Stored {
  readonly text: string;
  /** The key of the prompt that was edited. */
  readonly base: string;
}

/** A text that was typed and not yet submitted. */
function storedDraft(): Stored | undefined {
  try {
    return (JSON.parse(sessionStorage.getItem(STORED) ?? "null") as Stored | null) ?? undefined;
  } catch {
    return undefined;
  }
}

function storeDraft(draft: Stored | undefined): void {
  try {
    if (draft === undefined) sessionStorage.removeItem(STORED);
    else sessionStorage.setItem(STORED, JSON.stringify(draft));
  } catch {
    // Storage full or not allowed: then the draft is lost with the page.
  }
}

export interface Draft {
  /** What the field shows. */
  readonly text: string;
  /** Whether it differs from the submitted text. */
  readonly edited: boolean;
  set(text: string | undefined): void;
}

/** The typed text; `field` holds the submitted one. Another prompt from the address (back, a link) replaces it. */
export function useDraft(field: TextField): Draft {
  const [draft, setDraft] = useState(storedDraft);
  const prompt = field.text ?? "";
  const edited = draft !== undefined && draft.base === field.key && draft.text !== prompt;
  return {
    text: edited ? draft.text : prompt,
    edited,
    set: (text) => {
      // A textarea normalizes line ends; a text that was not edited keeps its own.
      const same = text === undefined || text === prompt.replace(/\r\n?/g, "\n");
      const next = same ? undefined : { text, base: field.key };
      storeDraft(next);
      setDraft(next);
    },
  };
}

interface PromptFormProps {
  readonly name: string;
  readonly label: string;
  readonly button: string;
  readonly rows?: number;
  readonly draft: Draft;
  /** Other controls beside the button. */
  readonly children?: ComponentChildren;
  onSubmit(text: string): void;
}

export function PromptForm({ name, label, button, rows = 2, draft, children, onSubmit }: PromptFormProps): JSX.Element {
  const { common } = useStrings();
  const submit = (): void => {
    const { text } = draft;
    draft.set(undefined);
    onSubmit(text);
  };
  return (
    <form
      class="prompt"
      onSubmit={(event) => {
        event.preventDefault();
        submit();
      }}
    >
      <div class="prompt-head">
        <label for="prompt">{label}</label>
        <span class="note edited" role="status">
          {draft.edited ? common.edited : ""}
        </span>
      </div>
      <textarea
        id="prompt"
        name={name}
        rows={rows}
        spellcheck={false}
        value={draft.text}
        onInput={(event) => draft.set(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
          event.preventDefault();
          submit();
        }}
      />
      <div class="controls buttons">
        <button type="submit" title="Ctrl+Enter">
          {button}
        </button>
        {children}
      </div>
    </form>
  );
}
