// Lint rules of the page: TypeScript's recommended ones with types, and those of hooks.
import js from "@eslint/js";
import hooks from "eslint-plugin-react-hooks";
import tseslint from "typescript-eslint";

export default tseslint.config(
  { ignores: ["node_modules"] },
  js.configs.recommended,
  tseslint.configs.recommendedTypeChecked,
  { languageOptions: { parserOptions: { project: "./tsconfig.json", tsconfigRootDir: import.meta.dirname } } },
  { files: ["*.js", "tests/**"], extends: [tseslint.configs.disableTypeChecked] }, // golden.json is any
  {
    files: ["src/**/*.{ts,tsx}"],
    plugins: { "react-hooks": hooks },
    rules: { "react-hooks/rules-of-hooks": "error" },
  },
  {
    rules: {
      "@typescript-eslint/unbound-method": "off", // components take their callbacks apart
      "@typescript-eslint/no-base-to-string": "off", // of form fields, which hold text
      "no-control-regex": "off", // tokens hold control characters, which are searched for on purpose
      "@typescript-eslint/no-unused-vars": ["error", { argsIgnorePattern: "^_", varsIgnorePattern: "^_" }],
    },
  },
);
