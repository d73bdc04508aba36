// Tokens as text: parts of characters are seen as bytes, and become characters side by side.
import { expect, test } from "vitest";
import { ending, joined, visible } from "../src/ui/tokenText";

const PARTS = ["\udce4\udcbd", "\udca0"]; // 你, in two tokens

test("parts of characters are named by their bytes, and joined they are the character", () => {
  expect(visible(PARTS[0] ?? "")).toBe("⟨E4⟩⟨BD⟩");
  expect(joined(["我", ...PARTS, "好 "])).toBe("我你好 ");
  expect(joined(["a", PARTS[0] ?? ""])).toBe("a\ufffd");
  expect(joined(["💀", ...PARTS])).toBe("💀你"); // whose second half is U+DC80
  expect(visible("💀")).toBe("💀");
});

test("what cannot be seen gets a shape", () => {
  expect(visible(" a\n\u202e\u0000")).toBe("␣a↵⟨202E⟩⟨0000⟩");
  expect(visible("\ufe0f")).toBe("⟨FE0F⟩");
  expect(visible("")).toBe("∅");
});

test("a name is the end of a text, on one line", () => {
  expect(ending("  Once\n upon a time ")).toBe("Once upon a time");
  expect(ending("Once upon a time", 6)).toBe("… time");
  expect(ending("a\u202eb")).toBe("a⟨202E⟩b");
  expect([...ending("你".repeat(40))]).toHaveLength(26);
});
