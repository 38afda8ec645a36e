//! Validation of the names of records, which are shown on pages, in terminals and in logs, and of
//! what manages them.

use std::borrow::Cow;

use gw_shared::id::ManagerName;
use gw_shared::text::is_invisible;
use utoipa::openapi::{ObjectBuilder, RefOr, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

use crate::control::ControlError;

const LENGTH_MAX: usize = 100;

/// Trims and checks a name. Refuses characters that are not seen, and those that reorder others: a
/// name with them looks like another one.
pub fn checked_name(name: &str) -> Result<String, ControlError> {
    let name = name.trim();
    if let Some(refused) = name.chars().find(|character| is_invisible(*character)) {
        let message = format!(
            "has the character U+{:04X}; characters that are invisible or reorder others are not \
             allowed",
            u32::from(refused)
        );
        return Err(ControlError::invalid("name", message));
    }
    if (1..=LENGTH_MAX).contains(&name.chars().count()) {
        Ok(name.to_owned())
    } else {
        Err(ControlError::invalid(
            "name",
            format!("must have 1 to {LENGTH_MAX} characters"),
        ))
    }
}

/// A name in the description of the API, which states what [`checked_name`] accepts.
pub(crate) struct NameText;

impl ToSchema for NameText {
    fn name() -> Cow<'static, str> {
        "Name".into()
    }
}

impl PartialSchema for NameText {
    fn schema() -> RefOr<Schema> {
        let refused = invisible_ranges();
        ObjectBuilder::new()
            .schema_type(Type::String)
            .description(Some(
                "Without invisible characters, and without spaces at its ends.",
            ))
            .min_length(Some(1))
            .max_length(Some(LENGTH_MAX))
            .pattern(Some(format!(
                r"^[^{refused}\s]([^{refused}]*[^{refused}\s])?$"
            )))
            .into()
    }
}

/// The ranges of [`is_invisible`] for a class of a regular expression. Characters above U+FFFF are
/// written as they are: the languages of regular expressions have no common escape for them.
fn invisible_ranges() -> String {
    let end = |character: char| match u32::from(character) {
        low @ ..=0xffff => format!("\\u{low:04x}"),
        _ => character.to_string(),
    };
    let mut ranges = String::new();
    let mut characters = ('\0'..=char::MAX).peekable();
    while let Some(first) = characters.find(|character| is_invisible(*character)) {
        let mut last = first;
        while let Some(next) = characters.next_if(|character| is_invisible(*character)) {
            last = next;
        }
        ranges += &format!("{}-{}", end(first), end(last));
    }
    ranges
}

/// What manages a record after a request that gives `managed_by`: unchanged if it is left out,
/// nothing if it is empty.
pub(crate) fn manager_after(
    managed_by: Option<&str>,
    before: Option<&ManagerName>,
) -> Result<Option<ManagerName>, ControlError> {
    match managed_by {
        None => Ok(before.cloned()),
        Some("") => Ok(None),
        Some(name) => ManagerName::new(name)
            .map(Some)
            .map_err(ControlError::bad_id("managed_by")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use unicode_properties::{GeneralCategory, UnicodeGeneralCategory};

    use super::*;

    #[test]
    fn names_are_trimmed_and_allow_any_script() {
        for name in [
            "a",
            "edge 1 (Z\u{fc}rich)",
            "\u{5d0}\u{5d1}\u{5d2}",
            "\u{928}\u{93f}\u{926}\u{947}\u{936} \u{1f468}",
            &"\u{e4}".repeat(100),
        ] {
            assert_eq!(checked_name(&format!(" {name}\t")).unwrap(), name);
        }
        for name in ["", " ", &"x".repeat(101)] {
            assert_eq!(
                checked_name(name).unwrap_err().to_string(),
                "name: must have 1 to 100 characters"
            );
        }
    }

    /// Properties Default_Ignorable_Code_Point and Bidi_Control, but for categories that are
    /// refused as a whole; then letters and signs without ink.
    fn is_unseen(character: char) -> bool {
        matches!(
            character,
            '\u{34f}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
        ) || matches!(
            character,
            '\u{2065}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{ffa0}' | '\u{fff0}'..='\u{fff8}'
        ) || matches!(character, '\u{e0000}'..='\u{e0fff}')
            || matches!(
                character,
                '\u{2800}' | '\u{13440}'..='\u{13442}' | '\u{16fe4}' | '\u{1d159}'
            )
    }

    #[test]
    fn exactly_the_characters_that_are_not_seen_are_refused_with_their_code_point() {
        for character in '\0'..=char::MAX {
            let refused = match character.general_category() {
                GeneralCategory::Control
                | GeneralCategory::Format
                | GeneralCategory::LineSeparator
                | GeneralCategory::ParagraphSeparator => true,
                GeneralCategory::SpaceSeparator => character != ' ',
                _ => is_unseen(character),
            };
            let checked = checked_name(&format!("a{character}b"));
            let expected = format!(
                "name: has the character U+{:04X}; characters that are invisible or reorder others \
                 are not allowed",
                u32::from(character)
            );
            assert_eq!(
                checked.map_err(|error| error.to_string()).err(),
                refused.then_some(expected),
                "U+{:04X}",
                u32::from(character)
            );
        }
    }

    proptest! {
        #[test]
        fn no_name_has_an_invisible_character(name in any::<String>(), added in any::<char>()) {
            let is_accepted = |name: &str| checked_name(name).is_ok();
            let name = name.trim();
            if is_accepted(name) {
                prop_assert!(!name.contains(is_invisible));
                let longer = format!("a{added}{name}");
                let fits = longer.trim().chars().count() <= LENGTH_MAX;
                prop_assert_eq!(is_accepted(&longer), fits && !is_invisible(added));
            }
        }
    }
}
