//! Faults as edits of the product's files.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// A change of one place.
pub(crate) struct Edit {
    /// Path from the root of the repository.
    pub(crate) file: &'static str,
    /// Text that occurs once.
    pub(crate) from: &'static str,
    /// The text in its place. `MUTANT` is whether the mutant is on.
    pub(crate) to: &'static str,
}

/// The texts of edited files, by their paths from the root.
pub(crate) type Edited = BTreeMap<&'static str, String>;

/// Applies all edits of these mutants, each with its name. Fails if an edit has no place.
pub(crate) fn apply(
    root: &Path,
    mutants: impl IntoIterator<Item = (&'static str, &'static [Edit])>,
) -> Result<Edited, String> {
    let mut texts = Edited::new();
    for (name, edits) in mutants {
        for Edit { file, from, to } in edits {
            let read = || fs::read_to_string(root.join(file));
            let text = match texts.remove(file) {
                Some(text) => text,
                None => {
                    read().map_err(|error| format!("mutant {name}: cannot read {file}: {error}"))?
                }
            };
            let found = text.matches(from).count();
            if found != 1 {
                return Err(format!(
                    "mutant {name}: {file} has {found} times, and not once, the text\n{from}\n\
                     Change the mutant in gateway/simulation/mutants/tests/mutants with the code."
                ));
            }
            let to = to.replace("MUTANT", &format!("gw_shared::mutant({name:?})"));
            texts.insert(*file, text.replace(from, &to));
        }
    }
    Ok(texts)
}
