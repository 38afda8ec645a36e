//! Form data with its errors.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::control::ControlError;

/// The fields of a form, as submitted or as initial values. Without `Debug`, because forms carry
/// secrets.
#[derive(Clone, Default)]
pub(crate) struct Form {
    fields: Vec<(String, String)>,
    errors: Vec<(String, String)>,
}

impl Form {
    /// Name of the field with the form token.
    pub(crate) const TOKEN: &'static str = "form_token";
    /// Name of the field with a private key, which no page shows.
    pub(crate) const PRIVATE_KEY: &'static str = "private_key";
    /// Key of errors that do not belong to one field.
    const WHOLE: &'static str = "";

    pub(crate) fn parse(body: &[u8]) -> Self {
        Self {
            fields: form_urlencoded::parse(body).into_owned().collect(),
            errors: Vec::new(),
        }
    }

    #[must_use]
    pub(crate) fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        self.fields.push((name.to_owned(), value.into()));
        self
    }

    /// Sets the value of a field.
    pub(crate) fn set(&mut self, name: &str, value: &str) {
        self.fields.retain(|(other, _)| other != name);
        self.fields.push((name.to_owned(), value.to_owned()));
    }

    /// Sets a check box.
    #[must_use]
    pub(crate) fn with_box(self, name: &str, ticked: bool) -> Self {
        if ticked { self.with(name, "on") } else { self }
    }

    /// Copies the errors of another form.
    #[must_use]
    pub(crate) fn with_errors_of(mut self, other: &Self) -> Self {
        self.errors.extend(other.errors.iter().cloned());
        self
    }

    /// The value of a field; empty if the field is missing.
    pub(crate) fn value(&self, name: &str) -> &str {
        self.fields
            .iter()
            .find(|(other, _)| other == name)
            .map_or("", |(_, value)| value)
    }

    /// Whether the field was submitted, empty or not.
    pub(crate) fn is_sent(&self, name: &str) -> bool {
        self.fields.iter().any(|(other, _)| other == name)
    }

    /// The trimmed value of a field, unless it is empty.
    pub(crate) fn filled(&self, name: &str) -> Option<String> {
        Some(self.value(name).trim())
            .filter(|value| !value.is_empty())
            .map(str::to_owned)
    }

    /// Values of all ticked boxes of one name.
    pub(crate) fn values(&self, name: &str) -> Vec<String> {
        self.fields
            .iter()
            .filter(|(other, _)| other == name)
            .map(|(_, value)| value.clone())
            .collect()
    }

    pub(crate) fn has(&self, name: &str, value: &str) -> bool {
        self.fields
            .iter()
            .any(|(other, it)| other == name && it == value)
    }

    pub(crate) fn is_ticked(&self, name: &str) -> bool {
        self.has(name, "on")
    }

    /// A whole number in a field, if it is filled. Adds an error if the number is invalid.
    pub(crate) fn number<T: FromStr + PartialOrd + Display>(
        &mut self,
        name: &str,
        range: RangeInclusive<T>,
    ) -> Option<T> {
        let text = self.filled(name)?;
        let number = text.parse().ok().filter(|number| range.contains(number));
        if number.is_none() {
            self.refuse(
                name,
                format!(
                    "must be a whole number from {} to {}",
                    range.start(),
                    range.end()
                ),
            );
        }
        number
    }

    pub(crate) fn refuse(&mut self, name: &str, message: impl Into<String>) {
        self.errors.push((name.to_owned(), message.into()));
    }

    /// Whether the id was typed to confirm a deletion. Adds an error if it was not.
    pub(crate) fn confirms(&mut self, id: &str) -> bool {
        let confirmed = self.value("confirm").trim() == id;
        if !confirmed {
            self.refuse("confirm", format!("type {id} to confirm"));
        }
        confirmed
    }

    /// Adds an error of the control plane to the form; returns errors that no input can correct.
    pub(crate) fn refused_by(&mut self, error: ControlError) -> Result<(), ControlError> {
        match error {
            ControlError::Invalid { field, message } => self.refuse(field, message),
            ControlError::Conflict(_) | ControlError::HandedOver => {
                self.refuse(Self::WHOLE, error.to_string());
            }
            ControlError::Store(gw_store::StoreError::Full | gw_store::StoreError::NoRoom(_)) => {
                self.refuse(Self::WHOLE, error.to_string());
            }
            error => return Err(error),
        }
        Ok(())
    }

    /// The address of a list at `path` with the same filters, from a cursor on.
    pub(crate) fn address(&self, path: &str, filters: &[&str], cursor: &str) -> String {
        let mut query = form_urlencoded::Serializer::new(String::new());
        for name in filters {
            if let Some(value) = self.filled(name) {
                query.append_pair(name, &value);
            }
        }
        format!("{path}?{}", query.append_pair("cursor", cursor).finish())
    }

    pub(crate) fn is_refused(&self) -> bool {
        !self.errors.is_empty()
    }

    /// The error of a field.
    pub(crate) fn error(&self, name: &str) -> Option<&str> {
        self.errors
            .iter()
            .find(|(other, _)| other == name)
            .map(|(_, message)| message.as_str())
    }

    /// The errors that this page shows at none of its fields, each with the name of its field.
    pub(crate) fn errors_without_place(&self, page: &str) -> Vec<String> {
        let errors = self.errors.iter();
        let without = errors.filter(|(name, _)| !page.contains(&format!("id=\"{name}-error\"")));
        without
            .map(|(name, message)| match name.as_str() {
                Self::WHOLE => message.clone(),
                name => format!("{name}: {message}"),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn form_encoded_fields_are_parsed() {
        let mut form =
            Form::parse(b"id=a%3Cb+c&mode=jwt&mode=key&burst=+7+&refill=0&enabled=on&empty=+");
        assert_eq!(
            (form.value("id"), form.value("none"), form.filled("empty")),
            ("a<b c", "", None)
        );
        assert_eq!(
            (
                form.values("mode").len(),
                form.has("mode", "key"),
                form.is_ticked("enabled")
            ),
            (2, true, true)
        );
        assert_eq!(
            (
                form.number("burst", 1..=9u32),
                form.number("none", 1..=9u32)
            ),
            (Some(7), None)
        );
        assert!(!form.is_refused());
        assert_eq!(form.number("refill", 1..=9u32), None);
        assert_eq!(
            form.error("refill"),
            Some("must be a whole number from 1 to 9")
        );
    }

    #[test]
    fn errors_without_a_place_on_the_page_name_their_field() {
        let mut form = Form::default();
        form.refuse("burst", "is too large");
        form.refuse("id", "is taken");
        form.refuse(Form::WHOLE, "the store is full");
        let page = "<p class=\"error\" id=\"id-error\">is taken</p>";
        let expected = ["burst: is too large", "the store is full"];
        assert_eq!(form.errors_without_place(page), expected);
    }
}
