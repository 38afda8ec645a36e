//! Validation of the names of records, which are shown on pages, in terminals and in logs, and of what manages them.

use gw_shared::id::ManagerName;

use crate::control::ControlError;

const LENGTH_MAX: usize = 100;

/// Trims and checks a name. Refuses control characters, line and paragraph separators, and bidirectional controls
/// (Unicode UAX #9), which can make a name look like another one.
pub fn checked_name(name: &str) -> Result<String, ControlError> {
    let name = name.trim();
    if let Some(refused) = name.chars().find(|character| is_refused(*character)) {
        let message = format!(
            "has the character U+{:04X}; control characters, line separators and bidirectional controls are not allowed",
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

/// What manages a record after a request that gives `managed_by`: unchanged if it is left out, nothing if it is empty.
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

fn is_refused(character: char) -> bool {
    // General category Cc; then Zl and Zp; then Bidi_Control.
    character.is_control()
        || matches!(character, '\u{2028}' | '\u{2029}')
        || matches!(character, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_trimmed_and_allow_any_script() {
        let family = "\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}";
        for name in [
            "a",
            "edge 1 (Z\u{fc}rich)",
            "\u{5d0}\u{5d1}\u{5d2}",
            family,
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

    #[test]
    fn control_and_bidirectional_characters_are_refused_with_their_code_point() {
        let refused = [
            '\0', '\u{1b}', '\n', '\u{7f}', '\u{9b}', '\u{2028}', '\u{2029}', '\u{61c}',
            '\u{200e}', '\u{200f}',
        ];
        for character in refused
            .into_iter()
            .chain('\u{202a}'..='\u{202e}')
            .chain('\u{2066}'..='\u{2069}')
        {
            let error = checked_name(&format!("a{character}b"))
                .unwrap_err()
                .to_string();
            assert!(
                error.starts_with(&format!(
                    "name: has the character U+{:04X};",
                    u32::from(character)
                )),
                "{error}"
            );
        }
    }
}
